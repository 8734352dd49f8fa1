"""docs/huggingface.md runs as it is written, from training to lm-eval."""

import re
import shlex
from pathlib import Path

import pytest

from seqarch import cli
from tests.test_docs import FENCE

pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs/huggingface.md"
SHORT = ["--trainer.max_steps=4", "--model.warmup_steps=1", "--ood_loss.every_n_steps=4", "--data.eval_tokens=512",
         "--attention_entropy.every_n_steps=4", "--checkpoint.every_n_steps=4", "--model.d_model=32"]  # fmt: skip


def test_the_page_runs(tmp_path, monkeypatch):
    if not PAGE.is_file():
        pytest.skip("the pages are not part of an installed package")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for language, body in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(body, str(PAGE), "exec"), names)
        for line in re.findall(r"^\$ seqarch (.*)", body, flags=re.MULTILINE):
            words = shlex.split(line)
            cli.run(words + (SHORT if words[0] == "fit" else []))
    assert len(names["texts"]) == 2
    assert all(text.startswith(prompt) for text, prompt in zip(names["texts"], ["The ", "A longer"], strict=True))

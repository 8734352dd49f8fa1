"""docs/huggingface.md runs as it is written, from training to lm-eval and back."""

import re
import shlex
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

import seqarch
from seqarch import cli
from seqarch.evaluation import Scorer
from seqarch.evaluation.harness import SeqarchLM
from tests.test_docs import FENCE

pytestmark = pytest.mark.commands

PAGE = Path(__file__).parents[2] / "docs/huggingface.md"
SHORT = ["--trainer.max_steps=4", "--model.warmup_steps=1", "--ood_loss.every_n_steps=4", "--data.eval_tokens=512",
         "--attention_entropy.every_n_steps=4", "--checkpoint.every_n_steps=4", "--model.d_model=32"]  # fmt: skip


def test_the_page_runs(tmp_path, monkeypatch):
    if not PAGE.is_file():
        pytest.skip("the pages are not part of an installed package")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    page = PAGE.read_text(encoding="utf-8")
    for language, body in FENCE.findall(page):
        if language == "python":
            exec(compile(body, str(PAGE), "exec"), names)
        for line in re.findall(r"^\$ seqarch (.*)", body, flags=re.MULTILINE):
            words = shlex.split(line)
            cli.run(words + (SHORT if words[0] == "fit" else []))
    assert len(names["texts"]) == 2
    assert all(text.startswith(prompt) for text, prompt in zip(names["texts"], ["The ", "A longer"], strict=True))
    trained, tokenizer = seqarch.load("runs/small")
    again, tokens = seqarch.load("runs/again")[0], torch.randint(0, 257, (2, 40))
    with torch.no_grad():
        logits = trained.cpu()(tokens)
        assert torch.equal(again.cpu()(tokens), logits)
        assert torch.equal(names["model"](tokens).logits, logits)
    lm_eval_agrees(page, SeqarchLM(Scorer(trained, tokenizer)))


def lm_eval_agrees(page, ours):
    """The model that the page's command of lm-eval names gives the log-likelihoods of `ours`."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    (command,) = re.findall(r"^\$ lm_eval (.*)", page, flags=re.MULTILINE)
    words = shlex.split(command)
    model, arguments = (words[words.index(option) + 1] for option in ("--model", "--model_args"))
    theirs = get_model(model).create_from_arg_string(f"{arguments},dtype=float32", {"device": "cpu", "batch_size": 1})
    asked = [Instance("loglikelihood", {}, ("A short prompt", " an answer"), 0)]
    found = [torch.tensor(lm.loglikelihood(asked)[0][0]) for lm in (theirs, ours)]
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)

"""lm-eval's own model `hf` on an exported folder, and `seqarch eval`, agree."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from seqarch.data.tokenizers import load_tokenizer
from seqarch.evaluation import Scorer
from seqarch.evaluation.few_shot import FewShot
from seqarch.evaluation.harness import SeqarchLM
from tests.evaluation.test_few_shot import ROWS, folder  # noqa: F401 - a fixture
from tests.hf.test_model import MIXERS, OPTIONS

TASKS = ("openbookqa", "boolq", "hellaswag", "piqa", "winogrande")
LENGTH = 48
TEXTS = ["", "A short prompt", "one of more letters than a training sequence of forty-eight", "spaces  "]


@pytest.fixture
def both(exported):
    """The same model as lm-eval's `hf` and as ours."""
    lm, _, out = exported(MIXERS["hybrid"], **OPTIONS["hybrid"])
    hf: Any = HFLM
    theirs = hf(pretrained=str(out), device="cpu", batch_size=3, trust_remote_code=True, dtype="float32")
    return theirs, SeqarchLM(Scorer(lm, load_tokenizer("byte"), length=LENGTH))


def test_log_likelihoods_and_scores_of_five_tasks_are_equal(both, folder):  # noqa: F811
    assert {*TASKS} <= {*ROWS}
    tasks = {}
    for name in TASKS:
        task = FewShot(name, folder=str(folder))
        task.prepare(None)
        tasks |= task.tasks
    found: list[Any] = [evaluate(lm, dict(tasks), bootstrap_iters=0, log_samples=True) for lm in both]
    for name in tasks:
        pairs = zip(*(each["samples"][name] for each in found), strict=True)
        values = [[[one[0] for one in sample["filtered_resps"]] for sample in pair] for pair in pairs]
        torch.testing.assert_close(*torch.tensor(values).unbind(1), atol=1e-4, rtol=0)
        assert found[0]["results"][name]["acc,none"] == found[1]["results"][name]["acc,none"]


def test_texts_of_every_length_are_scored_and_continued_alike(both):
    asked = [Instance("loglikelihood", {}, (text, " an answer"), i) for i, text in enumerate(TEXTS)]
    likelihoods = [torch.tensor([one for one, _ in lm.loglikelihood(asked)]) for lm in both]
    torch.testing.assert_close(*likelihoods, atol=1e-4, rtol=0)
    options = {"until": ["\n"], "max_gen_toks": 12}
    asked = [Instance("generate_until", {}, (text, options), i) for i, text in enumerate(TEXTS[1:])]
    assert both[0].generate_until(asked) == both[1].generate_until(asked)

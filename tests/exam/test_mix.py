"""An exam of models that are trained on a mix of all domains."""

import json

import pytest

from seqarch.errors import UserError

pytestmark = pytest.mark.commands

TOP1 = ("--mixer", "Top1Chunk", "--mixer.chunk_size", "16")
MIX = {"data.train": "{docs: 0.7, code: 0.3}", "data.ood": "[]"}


def test_the_hold_outs_of_the_training_domains_are_compared(exam):
    folder = exam(*TOP1, **MIX) / "Top1Chunk-chunk_size=16"
    verdict = json.loads((folder / "verdict.json").read_text())
    assert list(verdict["draft"]["gaps"]) == ["code", "docs", "mean"]
    code, docs = (verdict["draft"]["gaps"][name] for name in ("code", "docs"))
    assert 0.7 * docs + 0.3 * code == pytest.approx(0, abs=1e-6)
    assert list(verdict["finished"]["budgets"][-1]["domains"]) == ["code", "docs"]
    said = (folder / "verdict.md").read_text()
    for words in (
        "| gap during training at equal loss on the held-out mix |",
        "\n| held-out mix         |",
        "\n| hold-out, code       |",
        "\n| hold-out, mean       |",
        "Weighted as in training, the gaps of the domains add up to zero: read them one by one.",
        "Gap during training: hold-out loss above the reference's where both have the same loss on the held-out mix (",
    ):
        assert words in said
    assert "OOD" not in said


def test_one_training_domain_and_no_ood_domain_are_refused_before_training(exam, tmp_path):
    with pytest.raises(UserError, match="only docs leaves nothing to compare"):
        exam(*TOP1, **{"data.ood": "[]"})
    assert not (tmp_path / "out").exists()

"""The script trains variants of the recall exam's model, each with one part changed."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from seqarch_recall import model
from seqarch_recall.settings import find_settings

from benchmarks.recall_reasons import OPTIONS, VARIANTS, WIDTH, BaseConv, Variant, build, make
from seqarch.tables import read_csv

ROOT = Path(__file__).parents[3]
TOKENS, PLACES = torch.arange(64).view(2, 32), torch.arange(32).expand(2, 32)


@pytest.mark.parametrize("variant", [VARIANTS[0], Variant("Based", "rmsnorm")])
def test_a_variant_without_changes_is_the_model_of_the_exam(variant: Variant):
    settings = find_settings("mqar", "tiny", {"seed": 3})
    options = model.derived(settings, variant.mixer, WIDTH, 32, OPTIONS)
    ours, exam = build(settings, variant), model.build(settings, variant.mixer, WIDTH, options, 64)
    assert [*map(str, ours.modules())] == [*map(str, exam.modules())]
    for mine, other in zip(ours.state_dict().items(), exam.state_dict().items(), strict=True):
        assert mine[0] == other[0]
        assert torch.equal(mine[1], other[1])


def test_a_variant_changes_one_part():
    settings = find_settings("mqar", "tiny", {})
    whole, half = (build(settings, each).eval().answers(TOKENS, PLACES) for each in VARIANTS[:2])
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), whole, rtol=0, atol=0.02)
    parts = {each: [type(part).__name__ for part in build(settings, each).modules()] for each in VARIANTS}
    assert [each.norm for each, found in parts.items() if "LayerNorm" in found] == ["layernorm"] * 4
    assert [each.convolution for each, found in parts.items() if "BaseConv" in found] == ["zoology"]


def test_the_convolution_is_that_of_zoology():
    ours, x = BaseConv(8, 0, 2), torch.randn(2, 5, 8)
    conv = torch.nn.Conv1d(8, 8, 3, groups=8, padding=2)
    with torch.no_grad():
        conv.weight.copy_(ours.convolution.weight[:, None])
        assert conv.bias is not None
        assert ours.convolution.bias is not None
        conv.bias.copy_(ours.convolution.bias)
    torch.testing.assert_close(ours(x), conv(x.mT)[..., :5].mT * ours.gate(x) + x)


def test_a_run_is_trained_with_its_seed_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    quick = {"train": [{"n": 64, "length": 32, "pairs": 4}], "batch": 32, "epochs": 1, "rates": [0.01]}
    for seed in (1, 2):
        make(VARIANTS[0], seed, tmp_path / f"{seed}.json", **quick)
    one, two = (json.loads((tmp_path / f"{seed}.json").read_text()) for seed in (1, 2))
    assert (one["seed"], one["epochs"], one["rate"], one["convolution"]) == ("1", "1", "0.01", "seqarch")
    assert one["accuracy"] != two["accuracy"]
    monkeypatch.setattr(sys, "argv", ["recall_reasons.py", str(tmp_path), str(tmp_path / "made.csv")])
    runpy.run_path(str(ROOT / "benchmarks/recall_reasons.py"), run_name="__main__")
    assert read_csv(tmp_path / "made.csv") == [one, two]

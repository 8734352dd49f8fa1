"""The table of what may explain recall is that of its CSV file, which the script makes by training variants."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.recall_reasons import OPTIONS, VARIANTS, WIDTH, BaseConv, Variant, build, make, table
from seqarch.recall import model
from seqarch.recall.settings import find_settings
from seqarch.tables import markdown, read_csv

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs/results/recall/reasons.csv"
LINEAR = VARIANTS[0]
TOKENS, PLACES = torch.arange(64).view(2, 32), torch.arange(32).expand(2, 32)


def test_the_page_has_the_table_of_the_csv():
    rows = read_csv(PUBLISHED)
    assert len({tuple(row.values())[:5] for row in rows}) == len(rows) == 8 * len(VARIANTS)
    assert "\n".join(markdown(list(table(rows)))) in (ROOT / "docs/results/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("variant", [LINEAR, Variant("Based", "rmsnorm")])
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
    expected = conv(x.mT)[..., :5].mT * ours.gate(x) + x
    torch.testing.assert_close(ours(x), expected)


def test_a_run_is_trained_with_its_seed(tmp_path: Path):
    quick = {"train": [{"n": 64, "length": 32, "pairs": 4}], "batch": 32, "epochs": 1, "rates": [0.01]}
    for seed in (1, 2):
        make(LINEAR, seed, tmp_path / f"{seed}.json", **quick)
    one, two = (json.loads((tmp_path / f"{seed}.json").read_text()) for seed in (1, 2))
    assert (one["seed"], one["epochs"], one["rate"], one["convolution"]) == ("1", "1", "0.01", "seqarch")
    assert one["accuracy"] != two["accuracy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json", "2.json"]


def test_the_script_reads_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for row in read_csv(PUBLISHED):
        (tmp_path / f"{'-'.join(list(row.values())[:5])}.json").write_text(json.dumps(row))
    arguments = [str(tmp_path), str(tmp_path / "made.csv"), "0"]  # the runs of seed 0 are there
    monkeypatch.setattr(sys, "argv", ["recall_reasons.py", *arguments])
    runpy.run_path(str(ROOT / "benchmarks/recall_reasons.py"), run_name="__main__")
    assert read_csv(tmp_path / "made.csv") == read_csv(PUBLISHED)
    assert capsys.readouterr().out.startswith("| mixer ")

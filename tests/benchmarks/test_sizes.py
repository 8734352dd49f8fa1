"""The order and the gaps at 42M parameters as predictions of those at 110M."""

from pathlib import Path

import pytest

from benchmarks.tables import predictions, sizes
from seqarch.scale.decisions import register
from seqarch.tables import readable, write_csv

GAPS: dict[str, dict[str, tuple[float, ...]]] = {
    "42M": {"transformer_pp": (0,), "mamba2": (0.1, 0.3), "window_128": (0.3, 0.3), "delta_net": (0.1, 0.1)},
    "110M": {"transformer_pp": (0,), "mamba2": (0.25,), "window_256": (0.2,), "delta_net": (-0.1,)},
}


@pytest.fixture(autouse=True)
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps of three models at both sizes, and their in-domain losses, which keep their order."""
    for folder, size, tokens in (("fourteen", "42M", sizes.SMALL), ("medium", "110M", sizes.PREDICTED)):
        (tmp_path / folder).mkdir()
        names = list(GAPS[size])
        rows = [(name, seed, tokens, gap) for name, gaps in GAPS[size].items() for seed, gap in enumerate(gaps)]
        rows += [(name, seed, 2 * tokens, 0.15) for name, seed, _, _ in rows if name != "window_256"]
        write_csv(tmp_path / folder / "pairs.csv", ("model", "seed", "tokens", "gap"), rows)
        losses = [(*row[:3], 3 + names.index(row[0]) / 10) for row in rows]
        write_csv(tmp_path / folder / "losses.csv", ("model", "seed", "tokens", "in_domain"), losses)
        write_csv(tmp_path / folder / "states.csv", ("model", "parameters"), [(name, 7) for name in names])
    for module in (sizes, predictions):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(sizes, "BUDGETS", (sizes.PREDICTED, 2 * sizes.PREDICTED))
    monkeypatch.setattr(sizes, "WRITTEN", tmp_path / "predictions.csv")
    columns = ("quantity", "model", "seed", "tokens", "low", "high")
    mamba2, window = ("mamba2", 1, 0.2, 0.3), ("window_256", 1, 0.1, 0.3)
    low_high = [mamba2, window, ("delta_net", 1, 0, 1), ("delta_net", 2, 0.1, 0.2)]
    written = [("gap_110m", model, 0, times * sizes.PREDICTED, *ends) for model, times, *ends in low_high]
    write_csv(tmp_path / "predictions.csv", columns, written)
    monkeypatch.setattr(sizes, "ORDER", tmp_path / "order.csv")
    for loss in sizes.LOSSES:
        register(tmp_path / "order.csv", loss, {"42M": sizes.rungs(loss)["42M"]})


def test_gaps_of_both_sizes_are_matched_and_scored(tmp_path: Path) -> None:
    assert sizes.gaps_of_110m()[1:] == [
        ["`delta_net`", "+0.100", "-0.100", "+0.150", "1 of 2"],
        ["`mamba2`", "+0.200", "+0.250", "+0.150", "1 of 1"],
        ["`window_256`", "+0.300", "+0.200", "-", "1 of 1"],
    ]
    sizes.write(sizes.figure(), tmp_path / "medium/sizes")
    assert (tmp_path / "medium/sizes.png").is_file()


def test_the_order_of_the_smaller_size_is_scored_by_pairs() -> None:
    """DeltaNet and the reference swap places, and so do Mamba-2 and the window."""
    right = {row[0]: (row[1], row[3]) for row in sizes.decisions_of_110m()[1:]}
    assert right[readable(sizes.PREDICTED)] == ("4 of 6 (67%)", "6 of 6 (100%)")
    assert [sizes.order_of_110m(loss) for loss in sizes.LOSSES] == ["4 of 6", "6 of 6"]


def test_a_gap_at_110m_is_scored_at_its_own_size() -> None:
    row = {"quantity": "gap_110m", "model": "mamba2", "seed": "0", "tokens": str(sizes.PREDICTED), "minus": ""}
    assert predictions.measured(row) == 0.25
    assert predictions.measured({**row, "quantity": "gap"}) is None

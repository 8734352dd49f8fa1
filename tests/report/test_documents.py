"""Losses by document: reading, resampling, and their part in the interval of a gap."""

import dataclasses
import zipfile

import numpy as np
import pytest

from seqarch.errors import UserError
from seqarch.report.documents import DocumentLosses, read_documents
from seqarch.report.gap import base_capability_gap
from seqarch.report.runs import Evaluations, load_run
from tests.report.runs_for_tests import write_run

N, K = 40, 24


def losses(seed, *, of_documents=0.3, gap=0.0, per_document=0.0):
    """A run whose documents differ in difficulty by `of_documents`, and whose gap differs between them."""
    random = np.random.default_rng(99)  # the documents are the same in all runs
    difficulty = {name: random.normal(size=N) * of_documents for name in ("in_domain/docs", "ood/code")}
    own = np.random.default_rng(seed).normal(size=N) * per_document
    falling = np.linspace(3.0, 2.0, K)[:, None]
    table = {"in_domain/docs": falling + difficulty["in_domain/docs"], "ood/code": falling + 1 + difficulty["ood/code"]}
    table["ood/code"] = table["ood/code"] + gap + own
    sequences = {name: np.full(N, 2) for name in table}
    documents = DocumentLosses(
        {name: 2 * table[name] for name in table}, sequences, {name: np.arange(N) for name in table}, {"docs": 1.0}
    )
    inside, ood = table["in_domain/docs"].mean(axis=1), {"code": table["ood/code"].mean(axis=1)}
    return Evaluations(np.arange(1, K + 1) * 1000, inside, ood, documents=documents)


def without_documents(run):
    return dataclasses.replace(run, documents=None)


def test_gap_against_itself_is_zero_with_an_empty_interval():
    (gap,) = base_capability_gap([losses(0)], [losses(0)])
    assert (gap.value, gap.low, gap.high) == pytest.approx((0, 0, 0), abs=1e-12)
    assert gap.documents == 2 * N


def test_difficulty_that_both_runs_meet_does_not_widen_the_interval():
    """Both curves move together: the comparison is paired."""
    (gap,) = base_capability_gap([losses(0, gap=0.1)], [losses(1)])
    assert (gap.low, gap.high) == pytest.approx((0.1, 0.1), abs=1e-9)


def test_a_gap_that_differs_between_documents_widens_it_by_the_error_of_the_mean():
    run, reference = losses(0, gap=0.1, per_document=0.2), losses(1)
    (gap,) = base_capability_gap([run], [reference])
    assert run.documents
    assert reference.documents
    error = (run.documents.loss["ood/code"] - reference.documents.loss["ood/code"])[0].std(ddof=1) / 2 / N**0.5
    assert gap.high - gap.low == pytest.approx(2 * 2.02 * error, rel=0.2)
    (bare,) = base_capability_gap([without_documents(run)], [without_documents(reference)])
    assert bare.high - bare.low < 1e-9
    assert bare.value == gap.value
    assert bare.documents == 0


def test_the_interval_moves_with_a_shift():
    run, reference = losses(0, per_document=0.2), losses(1)
    shifted = losses(0, per_document=0.2, gap=0.25)
    before, after = (base_capability_gap([one], [reference])[0] for one in (run, shifted))
    assert np.subtract((after.value, after.low, after.high), (before.value, before.low, before.high)) == pytest.approx(
        0.25
    )


def test_documents_count_only_where_all_runs_kept_the_same():
    run, reference = losses(0, per_document=0.2), losses(1)
    assert base_capability_gap([run], [without_documents(reference)])[0].documents == 0
    assert reference.documents
    others = dataclasses.replace(
        reference.documents, documents={name: one + 1 for name, one in reference.documents.documents.items()}
    )
    assert base_capability_gap([run], [dataclasses.replace(reference, documents=others)])[0].documents == 0


def test_all_documents_once_give_the_losses_of_the_run():
    run = losses(0, per_document=0.2)
    again = run.resampled({name: np.ones(N) for name in ("in_domain/docs", "ood/code")})
    assert again.in_domain == pytest.approx(run.in_domain)
    assert again.losses["code"] == pytest.approx(run.losses["code"])


@pytest.fixture
def run(tmp_path):
    """A run folder of five evaluations, with losses by sequence: documents 3 and 8 of one and two sequences."""
    folder = write_run(tmp_path / "a", "a", steps=100, domains=("code",))
    (folder / "evaluations").mkdir()
    for step in range(20, 101, 20):
        arrays = {}
        for name in ("in_domain/docs", "ood/code"):
            arrays[f"loss/{name}"] = np.array([1.0, 2.0, 3.0], dtype=np.float32) + step
            arrays[f"document/{name}"] = np.array([3, 8, 8], dtype=np.int32)
        np.savez(folder / f"evaluations/step_{step:08d}.npz", **arrays)
    return folder


def test_a_run_is_read_back_by_document(run):
    documents = load_run(run).evaluations.documents
    assert documents is not None
    assert documents.weight == {"docs": 1.0}
    assert documents.sequences["ood/code"].tolist() == [1, 2]
    assert documents.documents["ood/code"].tolist() == [3, 8]
    assert documents.loss["ood/code"].tolist() == [[1.0 + step, 5.0 + 2 * step] for step in range(20, 101, 20)]


def test_a_run_without_all_files_has_no_documents(run):
    (run / "evaluations/step_00000040.npz").unlink()
    assert load_run(run).evaluations.documents is None
    assert len(load_run(run).evaluations.in_domain) == 5


@pytest.mark.parametrize(("n", "drawn"), [(N, N - 1), (2, 1), (1, 1)])
def test_one_document_fewer_is_drawn_than_there_are(n, drawn):
    """So that the variance over drawings is unbiased (Rao and Wu 1988)."""
    documents = {"ood/code": np.arange(n)}
    losses = DocumentLosses({}, {}, documents, {})
    assert losses.draw(np.random.default_rng(0))["ood/code"].sum() == drawn


@pytest.mark.parametrize("wrong", [[], [np.nan, 1.0, 2.0], [[1.0, 2.0, 3.0]], ["a", "b", "c"], [1 + 1j] * 3])
def test_arrays_that_are_no_losses_are_named(run, wrong):
    path = run / "evaluations/step_00000040.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "loss/ood/code": np.array(wrong)})
    with pytest.raises(UserError, match=r"step_00000040\.npz is damaged: 'loss/ood/code' is not a list of finite numb"):
        assert load_run(run).evaluations


def test_a_file_that_unfolds_to_much_is_not_unfolded(run):
    path = run / "evaluations/step_00000040.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("loss.npy", "w") as part:
        for _ in range(257):
            part.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UserError, match=r"step_00000040\.npz unfolds to more than 256 MiB: remove it"):
        assert load_run(run).evaluations


def test_a_damaged_file_is_named(run):
    path = run / "evaluations/step_00000040.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"step_00000040\.npz is damaged: remove it"):
        assert load_run(run).evaluations
    with pytest.raises(UserError, match="no losses of in_domain/web"):
        read_documents(run, [20], {"web": 1.0})

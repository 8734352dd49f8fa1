"""Losses by document: reading and resampling. test_gap.py has their part in the interval."""

import zipfile

import numpy as np
import pytest

from seqarch.errors import UserError
from seqarch.report.documents import read_documents
from seqarch.report.runs import load_run
from tests.report.runs_for_tests import write_run


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


def test_the_last_evaluation_is_read_back_by_document(run):
    documents = load_run(run).documents()
    assert documents is not None
    assert documents.weight == {"docs": 1.0}
    assert documents.sequences["ood/code"].tolist() == [1, 2]
    assert documents.documents["ood/code"].tolist() == [3, 8]
    assert documents.loss["ood/code"].tolist() == [[101.0, 205.0]]


def test_drawn_documents_count_as_often_as_they_were_drawn(run):
    documents = load_run(run).documents()
    assert documents is not None
    inside, losses = documents.resampled({"in_domain/docs": np.array([1, 1]), "ood/code": np.array([2, 0])})
    assert (inside.tolist(), losses["code"].tolist()) == ([102.0], [101.0])
    assert {name: int(each.sum()) for name, each in documents.draw(np.random.default_rng(0)).items()} == {
        "in_domain/docs": 2,
        "ood/code": 2,
    }


def test_a_run_without_the_file_has_no_documents(run):
    (run / "evaluations/step_00000100.npz").unlink()
    assert load_run(run).documents() is None


@pytest.mark.parametrize("wrong", [[], [np.nan, 1.0, 2.0], [[1.0, 2.0, 3.0]], ["a", "b", "c"], [1 + 1j] * 3])
def test_arrays_that_are_no_losses_are_named(run, wrong):
    path = run / "evaluations/step_00000100.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "loss/ood/code": np.array(wrong)})
    with pytest.raises(UserError, match=r"step_00000100\.npz is damaged: 'loss/ood/code' is not a list of finite numb"):
        load_run(run).documents()


def test_a_file_that_unfolds_to_much_is_not_unfolded(run):
    path = run / "evaluations/step_00000100.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("loss.npy", "w") as part:
        for _ in range(257):
            part.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UserError, match=r"step_00000100\.npz unfolds to more than 256 MiB: remove it"):
        load_run(run).documents()


def test_a_damaged_file_is_named(run):
    path = run / "evaluations/step_00000100.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"step_00000100\.npz is damaged: remove it"):
        load_run(run).documents()
    with pytest.raises(UserError, match="no losses of in_domain/web"):
        read_documents(run, 20, {"web": 1.0})

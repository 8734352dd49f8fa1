"""What fails after the last step, in a callback or in a figure, leaves a finished run finished."""

import lightning as L
import pytest

from seqarch import cli
from seqarch.errors import SeqarchWarning
from seqarch.runs.folder import status
from tests.conftest import MODEL, TINY, flags


class FailsAtTheEnd(L.Callback):
    def on_train_end(self, trainer, pl_module):
        raise RuntimeError("lost the server")


class FailsInTheMiddle(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        raise RuntimeError("lost the server")


def allowed(name):
    return {"trainer.callbacks": f"[{{class_path: {__name__}.{name}}}]", "allow_code": __name__}


def test_a_callback_that_fails_after_the_last_step_is_a_warning(fit):
    with pytest.warns(SeqarchWarning, match="is finished; after its last step this failed: RuntimeError: lost the"):
        run = fit(**allowed("FailsAtTheEnd"))
    assert status(run) == "finished"
    with pytest.raises(RuntimeError, match="lost the server"):
        fit("other", **allowed("FailsInTheMiddle"))
    assert status(run.parent / "other") == "failed"


def test_a_figure_that_fails_is_a_line(shards, tmp_path, monkeypatch, capsys):
    def report(runs, out):
        raise RuntimeError("latex\x1b[2J was not found")

    monkeypatch.setattr("seqarch.experiment.run.report", report)
    cli.run(["fit", *flags(**{**TINY, **MODEL, "data.root": shards, "run_dir": tmp_path / "run"})])
    assert "  no plot      latex?[2J was not found\n" in capsys.readouterr().out

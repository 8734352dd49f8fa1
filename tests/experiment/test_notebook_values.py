"""What a notebook shows of experiments, runs and losses, and what Lightning does not say there."""

import logging
import pickle
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

import seqarch
from seqarch import Experiment, compare, load, load_run
from seqarch.errors import UserError
from seqarch.experiment.checks import without_chatter
from seqarch.mixers.attention import Attention
from seqarch.runs.results import Value
from tests.conftest import MODEL, TINY


class Own(Attention):
    """A mixer of this module."""


def options(shards, run_dir):
    return {**TINY, **MODEL, "data.root": shards, "run_dir": run_dir}


def test_names_for_completion_are_those_that_users_call():
    assert dir(seqarch) == sorted(seqarch.__all__)


def test_an_experiment_tells_its_model_and_its_run(shards, tmp_path, without_figures, capfd, caplog):
    experiment = Experiment.from_recipe({}, options(shards, tmp_path / "run"))
    said = repr(experiment)
    assert re.match(r"<Experiment: \d layers of Attention, d_model \d+, \d+ steps, run_dir \S+ \(not begun\)>", said)
    assert "no weights yet" in repr(experiment.model)
    assert repr(experiment.data) == f"<TextDataModule: docs 1, OOD code; sequences of 48 tokens from {shards}>"
    run = experiment.fit()
    out = "".join(capfd.readouterr()) + caplog.text
    assert not re.search("GPU available|Tip|litlogger|max_steps=.*reached|deprecated", out), out
    assert "(finished)" in repr(experiment)
    assert "no weights yet" not in repr(experiment.model)
    losses = experiment.evaluate()
    for tag, loss in losses.items():
        assert loss.low is None or (loss.high is not None and loss.low <= loss <= loss.high), tag
    code = losses["loss/ood/code"]
    assert repr(code) == f"{float(code):.4g} ({code.low:.4g} to {code.high:.4g})"
    assert repr(load_run(run)).startswith("<Run run, seed ")
    comparison = compare([run])
    assert repr(comparison) == comparison.table


def test_a_value_is_a_number_and_keeps_what_it_knows():
    value = Value(0.5, 0.25, 0.75, 8)
    assert (value - 0.25, f"{value:.2f}", np.mean([value, 1.5]), value == 0.5) == (0.25, "0.50", 1.0, True)
    again = pickle.loads(pickle.dumps(value))
    assert (again, again.low, again.high, again.n) == (0.5, 0.25, 0.75, 8)
    assert repr(Value(0.5)) == "0.5"


def test_curves_as_a_data_frame_have_a_row_per_step(fit, monkeypatch):
    pytest.importorskip("pandas")
    curves = load_run(fit()).curves
    frame = curves.to_pandas()
    assert frame.index.name == "step"
    assert list(frame.columns) == ["tokens", *curves]
    for tag, curve in curves.items():
        column = frame[tag].dropna()
        assert [*column.index] == [*curve.step[np.isfinite(curve.value)]]
        assert [*frame["tokens"][curve.step]] == [*curve.tokens]
        assert [*column] == [*curve.value[np.isfinite(curve.value)]]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="a data frame needs pandas: pip install pandas"):
        curves.to_pandas()


def test_classes_may_stand_for_their_names(shards, tmp_path, without_figures):
    named = {"class_path": Own, "init_args": {"n_heads": 2}}
    given: Any = {**options(shards, tmp_path / "run"), "model.mixers": {"own": named}}
    given["model.optimizer"] = torch.optim.SGD
    experiment = Experiment.from_recipe({}, given)
    assert experiment.config["model"]["mixers"]["own"]["class_path"] == f"{__name__}.Own"
    block: Any = experiment.build_on_meta().blocks[0]
    assert type(block.mixer) is Own
    run = experiment.fit()
    with pytest.raises(UserError, match="if you trust it, add --allow_code"):
        load(run)
    lm, _ = load(run, allow_code=__name__)
    assert type(lm.get_submodule("blocks.0.mixer")) is Own
    for path in (Attention, "Attention"):
        named = {"class_path": path, "init_args": {"n_heads": 2}}
        mixers = Experiment.from_recipe({"extends": "quickstart", "model": {"mixers": {"attention": named}}}).config
        assert mixers["model"]["mixers"]["attention"]["class_path"] == "seqarch.mixers.attention.Attention"


def test_a_class_does_not_let_a_file_name_others_of_its_package(shards, tmp_path):
    own = {"class_path": Own, "init_args": {"n_heads": 2}}
    other = {**own, "class_path": "tests.experiment.test_experiment.Own"}
    given = {**options(shards, tmp_path), "model.mixers": {"own": own, "other": other}}
    with pytest.raises(UserError, match=r"'tests\.experiment\.test_experiment\.Own' belongs neither to seqarch nor"):
        Experiment.from_recipe({}, given)


def test_a_class_inside_a_function_is_refused(shards, tmp_path):
    class Inside(Attention):
        pass

    with pytest.raises(UserError, match=r"<locals>.Inside cannot be imported by its name: define the class at the top"):
        Experiment.from_recipe({}, {**options(shards, tmp_path), "model.mixers": {"own": Inside}})


def test_lightning_speaks_as_before_afterwards():
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    with without_chatter():
        assert logger.level == logging.WARNING
    assert logger.level == before != logging.WARNING

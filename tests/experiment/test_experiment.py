"""Training from Python gives the same run as the command line, and the page of the docs runs as written."""

import ast
import enum
import importlib.metadata
import json
import re
import sys
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import RichProgressBar

import seqarch
from seqarch import Experiment, load
from seqarch.data.datamodule import TextDataModule
from seqarch.data.prepare import prepare
from seqarch.errors import UserError
from seqarch.evaluation.copying import Copying
from seqarch.experiment.evaluate import evaluate_checkpoint
from seqarch.experiment.load import generate_texts
from seqarch.experiment.run import outcome
from seqarch.mixers.attention import Attention
from seqarch.model import SequenceLM
from seqarch.report.runs import load_run
from seqarch.runs.folder import read_config, read_record, write_config, write_record
from tests.conftest import MODEL, TINY
from tests.report.runs_for_tests import write_run
from tests.texts import code, prose

ROOT = Path(__file__).parents[2]


def options(shards, run_dir):
    return {**TINY, **MODEL, "data.root": shards, "run_dir": run_dir}


def rows(run_dir):
    """What was measured, without the measured time."""
    lines = [line.split(",") for line in (run_dir / "curves.csv").read_text().splitlines()]
    kept = [index for index, tag in enumerate(lines[0]) if not tag.startswith("throughput/")]
    return [[cells[index] for index in kept] for cells in lines]


def test_fit_from_python_is_fit_on_the_command_line(fit, shards, tmp_path, capsys):
    typed = fit("typed")
    experiment = Experiment.from_recipe({}, options(shards, tmp_path / "called"))
    experiment.build_on_meta()  # what was done before changes nothing
    called = experiment.fit()
    assert called == experiment.run_folder
    assert rows(called) == rows(typed)
    capsys.readouterr()
    before = (called / "run.json").read_bytes()
    assert experiment.fit() == called
    assert "already finished" in capsys.readouterr().out
    assert (called / "run.json").read_bytes() == before


@pytest.mark.commands
@pytest.mark.parametrize(
    ("key", "default", "other"),
    [
        ("residual_in_fp32", False, True),
        ("mixers.attention.init_args.scaled_output", True, False),
        ("feed_forward.init_args.scaled_output", True, False),
    ],
)
def test_a_run_and_a_checkpoint_of_a_version_without_an_option_go_on(
    shards, tmp_path, without_figures, key, default, other
):
    def leave_out(model):
        *path, name = key.split(".")
        for each in path:
            model = model[each]
        del model[name]

    given = options(shards, tmp_path / "run")
    run = Experiment.from_recipe({}, given).fit()
    losses = load_run(run).curves["loss/train"].value
    (run / "checkpoints/step_00000004.ckpt").unlink()
    write_record(run, {**read_record(run), "status": "stopped"})
    config = read_config(run)
    leave_out(config["model"])
    write_config(run, config)
    checkpoint = run / "checkpoints/step_00000002.ckpt"
    content = torch.load(checkpoint, weights_only=True)
    leave_out(content["hyper_parameters"])
    torch.save(content, checkpoint)
    new = {**given, "run_dir": tmp_path / "new", "ckpt_path": checkpoint}
    for each, what in ((given, "another configuration"), (new, "another model")):
        said = rf"{what} \(model.{key} was {default}, is {other}\)"
        with pytest.raises(UserError, match=said):
            Experiment.from_recipe({}, {**each, f"model.{key}": other}).fit()
    assert not (tmp_path / "new").exists()
    Experiment.from_recipe({}, new).fit()
    assert [*load_run(tmp_path / "new").curves["loss/train"].value] == [*losses[2:]]
    Experiment.from_recipe({}, given).fit()
    assert [*load_run(run).curves["loss/train"].value] == [*losses]


def test_a_run_of_a_version_with_an_option_that_has_gone_is_another_one(shards, tmp_path):
    given = {**options(shards, tmp_path), "data.seed": 0}
    config = Experiment.from_recipe({}, given).config
    write_config(tmp_path, {**config, "model": {**config["model"], "gone": 3}})
    with pytest.raises(UserError, match=r"another configuration \(model.gone was 3, is None\)"):
        Experiment.from_recipe({}, given).fit()


def test_a_trial_takes_the_steps_that_are_trained_and_refuses_what_memory_cannot_hold(shards, tmp_path, monkeypatch):
    seen, done = [], []
    given = {**options(shards, tmp_path / "run"), "trainer.precision": "bf16-true", "model.compile": "true"}
    step = torch.optim.AdamW.step
    with monkeypatch.context() as patch:
        patch.setattr(
            Attention, "forward", lambda self, x, **more: seen.append((self.out.weight.dtype, *x.shape)) or self.out(x)
        )
        patch.setattr(SequenceLM, "compile_parts", lambda self: done.append("compiled"))
        patch.setattr("seqarch.training.module.use_float8", lambda blocks, scaling: done.append(scaling))
        patch.setattr("seqarch.training.module.check_float8", lambda trainer: done.append("FP8 checked"))
        patch.setattr(torch.optim.AdamW, "step", lambda self, *args: done.append("step") or step(self, *args))
        Experiment.from_recipe({}, {**given, "model.float8": "rowwise"}).try_out()
    assert set(seen) == {(torch.bfloat16, 2, 48, 32)}
    assert done == ["FP8 checked", "rowwise", "compiled", "step", "step"]
    with pytest.raises(UserError, match=r"trainer.max_epochs is 3, but samples follow from max_steps"):
        Experiment.from_recipe({}, {**given, "trainer.max_epochs": "3"}).try_out()
    with pytest.raises(UserError, match=r"trainer.gradient_clip_algorithm must be norm, as it is by default"):
        Experiment.from_recipe({}, {**options(shards, tmp_path), "trainer.gradient_clip_algorithm": "value"}).try_out()
    monkeypatch.setattr("seqarch.experiment.checks.BYTES_PER_PARAMETER", 2**40)
    monkeypatch.setattr(SequenceLM, "forward", lambda *args: pytest.fail("it was built"))
    with pytest.raises(UserError, match=r"[\d,]+ parameters take at least"):
        Experiment.from_recipe({}, given).try_out()
    assert not (tmp_path / "run").exists()


def test_a_mapping_and_its_overrides_are_one_recipe(shards, tmp_path):
    recipe = {"extends": "quickstart", "model": {"d_model": 64}}
    config = Experiment.from_recipe(recipe, {"model": {"n_layers": 1}, "trainer.max_steps": 7}).config
    assert (config["model"]["d_model"], config["model"]["n_layers"], config["trainer"]["max_steps"]) == (64, 1, 7)
    assert Experiment.from_recipe(config).config == config
    with pytest.raises(UserError, match="model has no option 'd_modle': did you mean d_model"):
        Experiment.from_recipe({"extends": "quickstart", "model": {"d_modle": 3}})
    with pytest.raises(UserError, match=r"^model\.d_model is a b: expected a whole number \(at least 1\)$"):
        Experiment.from_recipe("quickstart", {"model.d_model": "a\nb"})
    with pytest.raises(UserError, match=r"the recipe holds <object .*>: expected plain values and classes"):
        Experiment.from_recipe({"model": {"d_model": object()}})
    with pytest.raises(UserError, match=r"^model\.learning_rate: a number has more than 300 digits$"):
        Experiment.from_recipe("quickstart", {"model.learning_rate": 10**400})
    endless: Any = {}
    endless["data.train"] = endless
    with pytest.raises(UserError, match=r"^the recipe stands for more than 20,000 entries"):
        Experiment.from_recipe("quickstart", endless)
    with pytest.raises(ValueError, match="unknown recipe 'quikstart': did you mean quickstart"):
        Experiment.from_recipe("quikstart")
    with pytest.raises(UserError, match=r"^unknown recipe 'zzz' \(`seqarch recipes` lists all\)$"):
        Experiment.from_recipe("zzz")


def test_names_in_an_override_stand_as_in_a_file():
    for train in ({"data.train": {"web.en": 1.0}}, {"data": {"train": {"web.en": 1.0}}}):
        assert Experiment.from_recipe("quickstart", train).config["data"]["train"] == {"web.en": 1.0}


@pytest.mark.parametrize("option", ["data.root", "run_dir"])
def test_a_text_is_as_it_is_spelled_over_any_other(option):
    args = ["--config", "quickstart", f"--{option}", "name", f"--{option}", "a: b", f"--{option}", "c: d"]
    config = Experiment(args).config
    assert (config["data"] | config)[option.rpartition(".")[2]] == "c: d"


def test_overrides_may_be_numbers_of_numpy_and_torch(shards, tmp_path):
    rates = {"model.learning_rate": np.float32(0.25), "model.weight_decay": torch.tensor(0.125)}
    given = {**options(shards, tmp_path), "trainer.max_steps": np.int64(3), **rates}
    config = Experiment.from_recipe({}, {**given, "ood_loss.at": [np.int64(1), torch.tensor(0.5)]}).config
    assert (config["trainer"]["max_steps"], config["ood_loss"]["at"]) == (3, [1, 0.5])
    assert (config["model"]["learning_rate"], config["model"]["weight_decay"]) == (0.25, 0.125)


def test_an_override_of_a_strange_type_is_refused(shards, tmp_path):
    for strange in (Attention, object()):
        with pytest.raises(UserError, match=r"model\.d_model"):
            _ = Experiment.from_recipe({}, {**options(shards, tmp_path), "model.d_model": strange}).config


def test_one_text_is_a_list_of_itself(fit, shards, tmp_path):
    run, given = fit(), options(shards, tmp_path / "run")
    with pytest.raises(UserError, match="unexpected argument 'nope'"):
        Experiment("nope")
    loaded = load(run, allow_code="tests.experiment")  # its letters hold a dot, which is no package
    own = {**given, "model.mixers": {"attention": {"class_path": f"{__name__}.Own", "init_args": {"n_heads": 2}}}}
    assert Experiment.from_recipe({}, own, allow_code="tests").allow_code == ("tests",)
    assert {row for row, _ in generate_texts(*loaded, "The", 2)} == {0}
    metrics = Experiment.from_recipe({}, {**given, "run_dir": run}).evaluate("Copying")
    assert metrics.keys() == {"copying/gain", "copying/loss_first", "copying/loss_again"}
    for tasks in ("Copying", ["Copying"], Copying(), [Copying()]):
        (result,) = evaluate_checkpoint(run, tasks, tmp_path / "results", allow_code="tests.experiment")
        assert result.task == "Copying"
    one: Any = "code"
    assert TextDataModule(train={"web": 1.0}, ood=one).ood == ["code"]
    mixers: Any = {"code": lambda *place: Attention(*place, n_heads=2)}
    assert SequenceLM(16, 8, 2, mixers, pattern=one, no_feed_forward=one).pattern == ["code", "code"]


class Own(Attention):
    """A mixer of this module."""


class Colour(enum.Enum):
    """Values of an option."""

    red = 1


@pytest.fixture
def odd(monkeypatch):
    """Makes a mixer whose option has a type and a default; returns a recipe with it."""

    def make(hint, default, **init_args):
        class Odd(Attention):
            def __init__(self, d_model, layer_idx, n_layers, odd=default) -> None:
                super().__init__(d_model, layer_idx, n_layers, n_heads=2)
                self.odd = odd

        Odd.__init__.__annotations__["odd"] = hint
        Odd.__qualname__ = "Odd"
        monkeypatch.setattr(sys.modules[__name__], "Odd", Odd, raising=False)
        return {"model": {"mixers": {"attention": {"class_path": f"{__name__}.Odd", "init_args": init_args}}}}

    return make


@pytest.mark.parametrize(
    ("hint", "default", "kind", "fitting"),
    [
        (int, 1.5, "a whole number", 2),
        (int | None, 1.5, "a whole number", 2),
        (bool, 1, "true or false", True),
        (str, 3, "text", "a"),
        (float, "many", "a number", 2.5),
        (dict, (), "a mapping, such as {name: value}", {}),
        (typing.Literal["exact", "approx"], "other", "exact or approx", "exact"),
    ],
)
def test_a_default_of_another_type_is_refused_unless_the_recipe_sets_the_option(
    shards, tmp_path, odd, hint, default, kind, fitting
):
    given = {key: value for key, value in options(shards, tmp_path / "run").items() if key != "model.mixers"}
    said = f"model.mixers.attention: Odd has {default!r} as default of its option 'odd', which is not {kind}: set the"
    with pytest.raises(UserError, match=re.escape(said)):
        Experiment.from_recipe(odd(hint, default), given, allow_code="tests")
    Experiment.from_recipe(odd(hint, default, odd=fitting), given, allow_code="tests")


@pytest.mark.parametrize(
    ("hint", "default", "init_args"),
    [
        (int, None, {}),
        (float, 1, {}),
        (float, float("inf"), {}),
        (list, (), {}),
        (list[str], ("a", "b"), {}),
        (typing.List, (), {"odd": [1, 2]}),  # noqa: UP006 - older plug-ins say so
        (typing.Tuple, (), {"odd": [1, 2]}),  # noqa: UP006
        (Colour, Colour.red, {}),
        (Colour, Colour.red, {"odd": "red"}),
        (typing.Literal[True, "all"], True, {}),
        (typing.Literal[True, "all"], "all", {"odd": True}),
        (str, "3", {}),
        (torch.dtype, torch.float32, {}),
        (torch.dtype | None, None, {"odd": "torch.bfloat16"}),
        (type[torch.nn.Module], torch.nn.LayerNorm, {}),
        (tuple[type[torch.nn.Module], ...], (torch.nn.LayerNorm, torch.nn.RMSNorm), {}),
        (list[type[torch.nn.Module]], [torch.nn.LayerNorm, torch.nn.RMSNorm], {}),
        (dict[str, type[torch.nn.Module]], {"q": torch.nn.LayerNorm}, {}),
        (type[torch.nn.Module] | None, torch.nn.LayerNorm, {"odd": "torch.nn.LayerNorm"}),
    ],
)
def test_what_an_option_may_hold_can_be_read_from_the_run(shards, tmp_path, odd, hint, default, init_args):
    given = {key: value for key, value in options(shards, tmp_path / "run").items() if key != "model.mixers"}
    config = Experiment.from_recipe(odd(hint, default, **init_args), given, allow_code="tests").config
    write_config(tmp_path, config)
    again = Experiment.from_recipe(tmp_path / "config.yaml", allow_code="tests")
    assert again.config == config
    block: Any = again.build_on_meta().blocks[0]
    built = block.mixer.odd
    expected = init_args.get("odd", default)
    if isinstance(built, type):
        assert built is default
        return
    if isinstance(built, torch.dtype):
        assert str(built) == str(expected)
        return
    assert built == (Colour.red if hint is Colour else built if expected is None else type(built)(expected))


def test_a_class_that_is_no_default_needs_leave(shards, tmp_path, odd):
    given = {key: value for key, value in options(shards, tmp_path / "run").items() if key != "model.mixers"}
    recipe = odd(type[torch.nn.Module], torch.nn.LayerNorm, odd="torch.nn.RMSNorm")
    with pytest.raises(UserError, match=r"odd is torch\.nn\.RMSNorm: expected a class of .* that --allow_code names$"):
        Experiment.from_recipe(recipe, given, allow_code="tests")
    block: Any = Experiment.from_recipe(recipe, given, allow_code=["tests", "torch"]).build_on_meta().blocks[0]
    assert block.mixer.odd is torch.nn.RMSNorm


def test_an_empty_name_is_no_checkpoint(fit, shards, monkeypatch):
    run = fit()
    monkeypatch.chdir(run)
    experiment = Experiment.from_recipe({}, {**options(shards, run), "ckpt_path": ""})
    for call in (experiment.fit, lambda: experiment.evaluate(checkpoint=""), lambda: load("")):
        with pytest.raises(UserError, match=r"^the name of the checkpoint is empty: name a file or a run folder$"):
            call()


def test_evaluation_needs_a_checkpoint_and_loading_a_model_too(shards, tmp_path):
    with pytest.raises(UserError, match="there is no checkpoint to evaluate"):
        Experiment.from_recipe({}, options(shards, tmp_path / "none")).evaluate()
    with pytest.raises(UserError, match="there is no checkpoint"):
        load(tmp_path / "none.ckpt")


def test_a_thread_that_gets_no_signals_is_refused_before_anything_is_written(shards, tmp_path):
    experiment = Experiment.from_recipe({}, options(shards, tmp_path / "run"))
    with ThreadPoolExecutor(1) as threads, pytest.raises(UserError, match="fit needs the main thread"):
        threads.submit(experiment.fit).result()
    assert not (tmp_path / "run").exists()


@pytest.mark.commands
def test_the_page_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    """On two small domains in place of the embedded corpus, a fourth of the tokens to evaluate, and without figures."""
    for name, texts in (("docs", prose(24)), ("python", code(24))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare([tmp_path / f"{name}.jsonl"], tmp_path / "shards", name, "byte", holdout=0.3, workers=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("seqarch.data.datamodule.find_root", lambda root: tmp_path / "shards")
    monkeypatch.setattr("seqarch.experiment.run.report", lambda runs, out: [out / "index.html"])
    names: dict = {}
    page = (ROOT / "docs/python.md").read_text().replace('"data.eval_tokens": 4096', '"data.eval_tokens": 1024')
    for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(block, names)
    assert set(names["losses"]) >= {"loss/in_domain/docs", "loss/ood/python"}
    assert "The function " in capsys.readouterr().out
    assert re.search(r"^top1_chunk .* [+-]\d\.\d{3}", names["comparison"].table, flags=re.MULTILINE)  # a draft gap


PRIVATE = {
    "jsonargparse": {"_typehint"},
    "lightning": {"_experiment"},  # of WandbLogger, whose `experiment` begins a run
    "argparse": {"_action_groups", "_actions", "_group_actions", "_SubParsersAction"},
    "collections": {"_asdict", "_replace"},  # documented, of a named tuple
    "gettext": {"_catalog"},
    "os": {"_exit"},
    "torch": {
        *("_dynamo", "_get_file_writer", "_orig_mod"),
        *("_foreach_add_", "_foreach_lerp", "_foreach_lerp_", "_foreach_mul_"),  # as its optimizers; none is public
    },
    "typing": {"_is_protocol"},
}
"""Members of other packages that begin with an underscore, as the package reads them."""


def sources():
    return [path.read_text() for path in Path(seqarch.__file__).parent.rglob("*.py")]


def private_members():
    """The names with one leading underscore that the package reads of objects and does not define."""
    read, ours = set(), set()
    for node in (node for source in sources() for node in ast.walk(ast.parse(source))):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                read.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                read.add(name)
            case ast.Attribute(attr=name) | ast.Name(id=name, ctx=ast.Store()):
                ours.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                ours.add(name)
    return {name for name in read - ours if re.match("_[^_]", name)}


def test_private_members_of_lightning_and_jsonargparse_are_two():
    """`RichProgressBar._get_train_description`, which we override, and `_typehint` have no public counterpart."""
    version = importlib.metadata.version
    assert hasattr(RichProgressBar, "_get_train_description"), f"lightning {version('lightning')} has renamed it"
    option = ArgumentParser().add_argument("--steps", type=int | None)
    assert getattr(option, "_typehint", None) == int | None, f"jsonargparse {version('jsonargparse')} has renamed it"
    assert private_members() == set().union(*PRIVATE.values())
    private = re.compile(r"(from|import) (lightning|jsonargparse)[\w.]*(\._| import _)")
    assert not any(map(private.search, sources()))


def test_the_outcome_of_a_run_with_few_facts(tmp_path):
    run = write_run(tmp_path / "a", "a", steps=100)
    record = {key: value for key, value in read_record(run).items() if key in ("name", "seed", "status")}
    write_record(run, record)
    said = outcome(run)
    assert said.startswith("a: 0 parameters, 409,600 tokens\n  in-domain docs")
    assert "\n  OOD       code" in said
    assert "(unigram entropy nan)" in said


def test_processes_that_share_a_sequence_need_no_sequence_each():
    two = {"trainer.accelerator": "cpu", "trainer.devices": 2, "data.sequences_per_step": 1}
    strategy = {"class_path": "seqarch.training.FSDP2", "init_args": {"context": 2}}
    Experiment.from_recipe("quickstart", {**two, "trainer.strategy": strategy}).check()
    with pytest.raises(UserError, match=r"x devices=2 does not divide data\.sequences_per_step=1"):
        Experiment.from_recipe("quickstart", {**two, "trainer.strategy": "fsdp2"}).check()

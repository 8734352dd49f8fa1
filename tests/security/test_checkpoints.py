"""Other people's checkpoints run no code, and make Lightning read or delete no other file."""

import contextlib
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy, Strategy

from seqarch import cli
from seqarch.errors import UserError
from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.run_folder import _forget_outside_files
from tests.conftest import MODEL, TINY, flags
from tests.security.conftest import BOMB, CALLS, said_of

IN_TURN = [(("mixers", "feed_forward")[number % 2], call) for number, call in enumerate(CALLS)]
"""Each call in one of both places: `test_names.py` tries all places of a recipe."""


@pytest.mark.parametrize(("key", "call"), [*IN_TURN, ("feed_forward", CALLS[0])], ids=str)
def test_checkpoint_calls_nothing(refused, checkpoint, trained, key, call):
    path = checkpoint(lambda c: c["hyper_parameters"].update({key: {"attention": call} if key == "mixers" else call}))
    assert said_of(call, refused("generate", "--checkpoint", path, "--prompt", "a"))
    said = refused("fit", "--config", trained / "config.yaml", "--run_dir", "other", "--ckpt_path", path)
    assert said.startswith(f"{path} holds another model (model.{key}")


def test_hyper_parameters_are_plain_and_small(refused, checkpoint):
    nest = ["x"] * 10
    for _ in range(9):
        nest = [nest] * 10
    for mixers in (nest, BOMB, {"a": BOMB}):
        path = checkpoint(lambda content, mixers=mixers: content["hyper_parameters"].update(mixers=mixers))
        assert "aliases in it repeat" in refused("generate", "--checkpoint", path, "--prompt", "a")


def weights(content, value):
    for weight in content["state_dict"].values():
        weight.fill_(value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(seqarch=None), "seqarch is None"),
        (lambda c: c["seqarch"].clear(), "tokenizer is None"),
        (lambda c: c["seqarch"].update(tokenizer=["byte"]), "tokenizer is ['byte']"),
        (lambda c: c["seqarch"].update(tokenizer="../gpt2"), "unknown tokenizer '../gpt2'"),
        (
            lambda c: c["seqarch"].update(tokenizer="mixtral"),
            "'mixtral' has 32,000 tokens: set model.vocab_size, 257, to that",
        ),
        (lambda c: c.pop("state_dict"), "state_dict is None"),
        (lambda c: c["state_dict"].update(x="y"), "it does not hold tensors by name"),
        (lambda c: c["state_dict"].update({3: torch.ones(1)}), "it does not hold tensors by name"),
        (lambda c: c["state_dict"].update(x=torch.ones(2).to_sparse()), "it does not hold tensors by name"),
        (
            lambda c: c["state_dict"].update(x=torch.nested.nested_tensor([torch.ones(1)])),
            "it does not hold tensors by name",
        ),
        (lambda c: c.update(global_step=-5), "global_step is -5"),
        (lambda c: c.update(global_step=10**30), "global_step is 1000"),
        (lambda c: weights(c, float("nan")), "is not finite, as after a training that diverged"),
        (lambda c: c.pop("hyper_parameters"), "hyper_parameters is None"),
        (lambda c: c["hyper_parameters"].update(d_model=64), "size mismatch for lm.embedding.weight"),
        (
            lambda c: c["hyper_parameters"].update(d_model=torch.tensor(32)),
            "its model holds tensor(32): expected plain values",
        ),
        (lambda c: c.update(global_step="../../x"), "global_step is '../../x'"),
        (lambda c: c.update(TextDataModule=1.5), "TextDataModule is 1.5"),
    ],
    ids=range(18),
)
def test_checkpoint_that_is_hardly_one(refused, checkpoint, change, said):
    assert said in refused("generate", "--checkpoint", checkpoint(change), "--prompt", "a")


def test_unpickler_that_stumbles_is_no_bug(refused, trained, tmp_path):
    """Changes every byte of the pickle in turn, which gives many kinds of errors in PyTorch."""
    (good,) = (trained / "checkpoints").glob("*.ckpt")
    with zipfile.ZipFile(good) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (name,) = [name for name in files if name.endswith("data.pkl")]
    for at in range(2, 60):
        broken = files[name][:at] + bytes([(files[name][at] + at) % 256]) + files[name][at + 1 :]
        with zipfile.ZipFile(tmp_path / "evil.ckpt", "w") as archive:
            for each, content in {**files, name: broken}.items():
                archive.writestr(each, content)
        with contextlib.suppress(UserError):
            read_checkpoint(tmp_path / "evil.ckpt")


def moments(content):
    """The state of AdamW of the embedding, whose kernel believes the shapes."""
    return content["optimizer_states"][0]["state"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("optimizer_states"), "holds only weights, so no run resumes from it"),
        (lambda c: c.update(optimizer_states=[]), "holds only weights, so no run resumes from it"),
        (lambda c: c.update(optimizer_states=1.5), "optimizer_states is 1.5"),
        (lambda c: c.update(lr_schedulers=True), "lr_schedulers is True"),
        (lambda c: c.update(loops={"fit_loop": 3}), "lacks what Lightning reads in a checkpoint (TypeError: "),
        (lambda c: c.update({"pytorch-lightning_version": "zz"}), "(InvalidVersion: Invalid version: 'zz')"),
        (lambda c: c["TextDataModule"].clear(), "lacks what Lightning reads in a checkpoint (KeyError: "),
        (lambda c: c["TextDataModule"].update(sequences_per_micro_step=0), "(ZeroDivisionError: "),
        (lambda c: c["TextDataModule"].update(position="x"), "the checkpoint's position in the data is damaged: ['x'"),
        (lambda c: c["TextDataModule"].update(train=torch.ones(2)), "(TypeError: Object of type Tensor is not JSON"),
        (lambda c: c["loops"]["fit_loop"].update(epoch_loop="x"), "its 'loops' hold more than numbers"),
        (lambda c: c["lr_schedulers"][0].update(last_epoch=10**400), "'lr_schedulers': a number has more than 300"),
        (lambda c: c["optimizer_states"][0]["param_groups"][0].update(lr="x"), "its 'optimizer_states' hold more"),
        (lambda c: c["lr_schedulers"][0].update(base_lrs=[]), "its 'lr_schedulers' are not those of its optimizer"),
        (lambda c: c["lr_schedulers"][0].update(step=5), "its 'lr_schedulers' are not those of its optimizer"),
        (lambda c: moments(c).pop("exp_avg"), "state of the optimizer is of another class or damaged"),
        (lambda c: moments(c).update(exp_avg=torch.zeros(3)), "state of the optimizer is of another class or damaged"),
        (lambda c: moments(c).update(exp_avg=torch.zeros(1, 1).expand(257, 32)), "it does not fit the parameters"),
        (lambda c: c["optimizer_states"][0]["param_groups"][1].update(maximize=True), "maximize is True there"),
        (lambda c: moments(c).update(exp_avg=moments(c)["exp_avg"].double()), "it does not fit the parameters"),
        (lambda c: c["seqarch"].update(rows="x"), "its 'rows' hold more than numbers"),
        (lambda c: c["loops"].update(x=[[]] * 20_001), "'loops' stands for more than 20,000 entries"),
    ],
)
def test_checkpoint_from_which_no_training_goes_on(refused, checkpoint, shards, change, said):
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": "other", "ckpt_path": checkpoint(change)}
    assert said in refused("fit", *flags(**options))


def test_lightning_chooses_no_checkpoint_by_itself(refused, trained, shards, tmp_path):
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": tmp_path / "run"}
    callback = '[{"class_path": "lightning.pytorch.callbacks.OnExceptionCheckpoint", "init_args": {"dirpath": "x"}}]'
    said = refused("fit", *flags(**options, **{"trainer.callbacks": callback}))
    assert "trainer.callbacks holds OnExceptionCheckpoint: leave it out" in said
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run/hpc_ckpt_1.ckpt").write_bytes(b"x")
    said = refused("fit", f"--config={tmp_path}/run/config.yaml", f"--run_dir={tmp_path}/run")
    assert "run/hpc_ckpt_1.ckpt is not a file of seqarch: remove it" in said


@pytest.mark.parametrize("name", ["last", "best", "hpc", "http:/x/a.ckpt", "registry:x"])
@pytest.mark.parametrize("command", ["fit", "validate"])
def test_lightning_reads_the_file_that_was_checked(trained, shards, tmp_path, monkeypatch, name, command):
    """Lightning would read these names as other files, or as a URL."""
    monkeypatch.chdir(tmp_path)
    (good,) = (trained / "checkpoints").glob("*.ckpt")
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(good, name)
    read = []
    monkeypatch.setattr(L.Trainer, command, lambda *args, ckpt_path, **options: read.append(ckpt_path))
    given = name.replace(":/", "://")
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": "run", "ckpt_path": given, "trainer.max_steps": 2}
    with contextlib.suppress(UserError):  # nothing was measured
        cli.run([command, *flags(**options)])
    assert read == [str(tmp_path / name)]


def test_checkpoint_with_a_name_that_chains_urls(refused, checkpoint):
    path = checkpoint(lambda content: None)
    path = path.rename(path.parent / "a::b.ckpt")
    assert "a::b.ckpt holds '::', as a URL may" in refused("generate", "--checkpoint", path, "--prompt", "a")


def test_strategy_that_reads_checkpoints_unchecked(monkeypatch, refused, shards):
    """FSDP of Lightning unpickles whole checkpoints without `weights_only`; a CPU cannot build it."""
    monkeypatch.setattr(SingleDeviceStrategy, "load_checkpoint", lambda *args, **options: {}, raising=False)
    said = refused("fit", *flags(**{**TINY, **MODEL, "data.root": shards, "run_dir": "run"}))
    assert "trainer.strategy SingleDeviceStrategy has checkpoints of its own: use ddp or fsdp2" in said
    for unchecked in (FSDPStrategy, DeepSpeedStrategy):
        assert unchecked.load_checkpoint is not Strategy.load_checkpoint


def test_strategy_whose_checkpoints_are_folders(refused, shards):
    """Its default is a folder with a pickle, `.metadata`, which would be refused when it is read."""
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": "run"}
    said = refused("fit", *flags(**options), "--trainer.strategy={class_path: ModelParallelStrategy}")
    assert said == "trainer.strategy ModelParallelStrategy has checkpoints of its own: use ddp or fsdp2"
    assert not Path("run").exists()


def test_folder_in_the_place_of_a_checkpoint(refused, trained, tmp_path):
    """As PyTorch's sharded checkpoints are, whose `.metadata` is a pickle without limits."""
    shutil.copytree(trained, tmp_path / "run")
    (path,) = (tmp_path / "run/checkpoints").glob("*.ckpt")
    path.unlink()
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Pickled()))
    config = f"--config={tmp_path}/run/config.yaml"
    for command in (
        ["generate", "--checkpoint", path, "--prompt", "a"],
        ["generate", "--checkpoint", "run", "--prompt", "a"],
        ["eval", "--checkpoint", "run", "--tasks", "Copying"],
        ["validate", config, "--ckpt_path", path],
        ["test", config, "--ckpt_path", path],
        ["fit", config, "--run_dir", "other", "--ckpt_path", path],
    ):
        assert "step_00000001.ckpt" in (said := refused(*command))
        assert "is neither checkpoint nor run: name a checkpoint" in said or said.startswith("there is no checkpoint")


@pytest.mark.parametrize("path", ["local:///{victim}", "{run}/../victim", "{victim}", "s3://bucket/x"])
def test_a_checkpoint_makes_lightning_delete_nothing_outside(tmp_path, path, capsys):
    run = tmp_path / "run"
    path = path.format(victim=tmp_path / "victim", run=run)
    for key, value in (("best_model_path", path), ("best_k_models", {path: 0.0}), ("last_model_path", path)):
        state = {"best_model_path": str(run / "a.ckpt"), key: value}
        _forget_outside_files({"callbacks": {"ModelCheckpoint": state}}, run)
        assert path not in str(state)
        assert "forgets its files" in capsys.readouterr().err
    state = {"best_model_path": str(run / "a.ckpt"), "best_k_models": {str(run / "a.ckpt"): 0.0}, "last_model_path": ""}
    kept = {**state}
    _forget_outside_files({"callbacks": {"ModelCheckpoint": state}}, run)
    assert state == kept


class Pickled:
    def __reduce__(self):
        return os.system, ("touch PWN",)


def test_pickle_is_refused_without_advice_to_load_it(refused, checkpoint, tmp_path):
    path = checkpoint(lambda content: content.update(evil=Pickled()))
    said = refused("generate", "--checkpoint", path, "--prompt", "a")
    assert said == f"{path} is not a checkpoint of seqarch: it asks for posix.system, which may run code"
    assert "weights_only" not in said
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps(Pickled()))
    refused("generate", "--checkpoint", "plain.ckpt", "--prompt", "a")

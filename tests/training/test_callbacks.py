import csv
import itertools
import json
import math
import shutil
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seqarch import cli
from seqarch.data.datamodule import TextDataModule
from seqarch.data.prepare import prepare
from seqarch.data.tokenize import split_of
from seqarch.errors import UserError
from seqarch.evaluation import RepeatGain, Scorer, evaluate
from seqarch.experiment.load import load
from seqarch.runs.folder import checkpoints
from seqarch.training.callbacks import OODLoss, RunCheckpoint
from seqarch.training.callbacks.attention_entropy import AttentionEntropy, layer_entropy
from seqarch.training.callbacks.throughput import Throughput, peak_tflops
from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.integrity import check_checkpoint
from seqarch.versions import version
from tests.conftest import MODEL, TINY, flags

pytestmark = pytest.mark.commands


def rows(run_dir):
    with (run_dir / "curves.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def column(run_dir, tag):
    return {int(row["step"]): float(row[tag]) for row in rows(run_dir) if row.get(tag)}


def set_status(run_dir, status):
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**record, "status": status}))


def stop_after(run_dir, step):
    """Leaves a finished run as if it had been killed after that step's checkpoint."""
    set_status(run_dir, "running")
    for path in checkpoints(run_dir):
        if path.name > f"step_{step:08d}.ckpt":
            path.unlink()


@pytest.fixture(scope="module")
def finished(shards, tmp_path_factory):
    """The folder of a run of four steps as `fit` makes it by default. Tests only read it."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.experiment.run.report", lambda runs, out: [out / "index.html"])
        cli.run(["fit", *flags(**TINY, **MODEL, **{"data.root": shards, "run_dir": run_dir})])
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path):
    """A copy of that run, which `fit` can continue."""
    return shutil.copytree(finished, tmp_path / "run")


def data(shards):
    module = TextDataModule(
        str(shards), {"docs": 1.0}, ["code"], sequence_length=48, sequences_per_step=4, eval_tokens=192
    )
    module.setup("validate")
    return module


def test_run_folder_holds_what_a_report_needs(finished):
    record = json.loads((finished / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["name"] == "run"
    assert record["mixers"] == {"attention": "Attention"}
    assert record["max_steps"] == 4
    assert record["unigram_entropy"]["docs"] == pytest.approx(3.1, abs=0.3)
    assert record["versions"]["torch"] == version("torch")
    assert yaml.safe_load((finished / "config.yaml").read_text())["model"]["d_model"] == 32
    assert set(column(finished, "loss/train")) == {1, 2, 3, 4}
    for tag in ("loss/in_domain", "loss/ood", "loss/ood/code", "entropy/layer_01", "entropy/layer_01/head_03"):
        assert set(column(finished, tag)) == {0, 2, 4}, tag
    assert column(finished, "throughput/tokens_per_second").keys() == {2, 4}
    assert {int(row["step"]): int(row["tokens"]) for row in rows(finished)}[4] == 4 * 4 * 48
    assert list(finished.glob("events*"))


def test_entropies_of_heads_can_be_left_out(fit, finished):
    layers = fit(**{"attention_entropy.heads": "false", "trainer.max_steps": 2})
    assert [tag for tag in rows(layers)[0] if "head_" in tag] == []
    assert column(layers, "entropy/layer_01")[0] == column(finished, "entropy/layer_01")[0]


def test_a_run_folder_stands_for_its_newest_checkpoint(finished):
    newest, named = (load(path)[0].state_dict() for path in (finished, finished / "checkpoints/step_00000004.ckpt"))
    assert all(weight.equal(named[name]) for name, weight in newest.items())


def test_logged_numbers_are_those_of_averaged_weights_that_a_checkpoint_has(fit, finished, shards):
    ema = "[{class_path: lightning.pytorch.callbacks.EMAWeightAveraging, init_args: {decay: 0.5}}]"
    run_dir = fit(**{"trainer.callbacks": ema})
    assert column(run_dir, "loss/train") == column(finished, "loss/train")
    test_logged_numbers_are_those_of_the_checkpointed_model(run_dir, shards)


def test_logged_numbers_are_those_of_the_checkpointed_model(finished, shards):
    lm, tokenizer = load(finished / "checkpoints/step_00000004.ckpt")
    assert tokenizer.name == "byte"
    sets = {each.domain: each.tokens for each in data(shards).evaluation_sets()}
    for tag, domain in (("loss/in_domain/docs", "docs"), ("loss/ood/code", "code")):
        with torch.no_grad():
            loss = lm(sets[domain][:, :-1], sets[domain][:, 1:])
        assert column(finished, tag)[4] == pytest.approx(float(loss), rel=1e-5)
    entropy = layer_entropy(lm, sets["docs"][:4, :-1])
    for layer, heads in entropy.items():
        assert column(finished, f"entropy/layer_{layer:02d}")[4] == pytest.approx(float(heads.mean()), rel=1e-5)


ATTENTION = "{class_path: Attention, init_args: {n_heads: 4}}"
DELTA_NET = "{class_path: DeltaNet, init_args: {n_heads: 2}}"


@pytest.mark.parametrize(
    ("mixers", "pattern", "tags"),
    [
        (f"{{delta: {DELTA_NET}}}", "null", ["implied_entropy/layer_00", "implied_entropy/layer_01"]),
        (
            f"{{delta: {DELTA_NET}, attention: {ATTENTION}}}",
            "[delta, attention]",
            ["implied_entropy/layer_00", "entropy/layer_01"],
        ),
    ],
    ids=["recurrent", "hybrid"],
)
def test_implied_entropy_is_logged_apart_from_that_of_attention(fit, shards, mixers, pattern, tags):
    run_dir = fit(**{"model.mixers": mixers, "model.pattern": pattern})
    lm, _ = load(run_dir / "checkpoints/step_00000004.ckpt")
    entropy = layer_entropy(lm, data(shards).evaluation_sets()[0].tokens[:4, :-1])
    expected = {}
    for layer, tag in enumerate(tags):
        expected[tag] = float(entropy[layer].mean())
        expected |= {f"{tag}/head_{head:02d}": float(value) for head, value in enumerate(entropy[layer])}
    logged = {tag: column(run_dir, tag) for tag in rows(run_dir)[0] if "entropy/" in tag}
    assert {tag: values[4] for tag, values in logged.items()} == pytest.approx(expected, rel=1e-5)
    assert all(values.keys() == {0, 2, 4} for values in logged.values())


def test_entropy_of_untrained_attention_is_near_that_of_a_uniform_distribution(finished):
    uniform = sum(math.log(i + 1) for i in range(48)) / 48
    assert column(finished, "entropy/layer_00")[0] == pytest.approx(uniform, rel=0.02)


def test_entropy_of_the_first_tokens_of_a_probe(fit):
    run_dir = fit(**{"attention_entropy.probe_length": 9, "trainer.max_steps": 1})
    uniform = sum(math.log(i + 1) for i in range(9)) / 9
    assert column(run_dir, "entropy/layer_00")[0] == pytest.approx(uniform, rel=0.02)


@pytest.mark.parametrize("option", ["probe_sequences", "probe_length"])
def test_probes_without_tokens_are_refused(option):
    wrong: dict[str, Any] = {option: 0}
    with pytest.raises(UserError, match=f"AttentionEntropy.{option} must be at least 1, not 0"):
        AttentionEntropy(**wrong)


def test_measuring_does_not_disturb_training(fit, finished):
    off = {f"{name}.every_n_steps": 0 for name in ("attention_entropy", "throughput", "checkpoint")}
    bare = fit(**off, **{"ood_loss.every_n_steps": 4})
    assert column(finished, "loss/train") == column(bare, "loss/train")
    assert column(finished, "loss/in_domain")[4] == column(bare, "loss/in_domain")[4]


def test_recall_probe_logs_and_does_not_disturb_training(fit, finished, shards):
    options = {"passage": 8, "distances": [0, 24]}
    run_dir = fit(**{"recall_probe.every_n_steps": 2, **{f"recall_probe.{key}": each for key, each in options.items()}})
    assert column(run_dir, "loss/train") == column(finished, "loss/train")
    lm, _ = load(run_dir / "checkpoints/step_00000004.ckpt")
    expected = evaluate([RepeatGain(**options)], Scorer(lm), data(shards)).metrics
    logged = {tag: column(run_dir, tag) for tag in expected}
    assert list(expected) == ["repeat_gain/0", "repeat_gain/24"]
    assert {tag: values[4] for tag, values in logged.items()} == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert all(values.keys() == {0, 2, 4} for values in logged.values())


def test_a_task_that_the_data_are_too_short_for_is_refused_before_the_run_begins(fit, tmp_path):
    with pytest.raises(UserError, match=r"data\.sequence_length for RepeatGain\.passage must be at least 768"):
        fit(**{"recall_probe.at": "[1.0]"})
    assert not (tmp_path / "run").exists()


def test_accumulated_steps_are_whole_steps(fit, finished):
    whole = fit(**{"data.micro_batch_size": 4})
    assert column(finished, "loss/train") == pytest.approx(column(whole, "loss/train"), rel=1e-5)
    assert column(finished, "loss/in_domain") == pytest.approx(column(whole, "loss/in_domain"), rel=1e-4)


def test_mean_training_loss_of_several_steps(fit, finished):
    each = column(finished, "loss/train")
    pairs = column(fit(**{"train_loss.every_n_steps": 2}), "loss/train")
    assert pairs == pytest.approx({2: (each[1] + each[2]) / 2, 4: (each[3] + each[4]) / 2})


def test_mean_training_loss_of_a_run_that_resumes_with_other_micro_batches(fit, finished):
    each, row = column(finished, "loss/train"), {"train_loss.every_n_steps": 4}
    stop_after(fit(**row), 2)
    resumed = column(fit(**row, **{"data.micro_batch_size": 4}), "loss/train")
    assert resumed == pytest.approx({4: sum(each.values()) / 4}, rel=1e-5)


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_logged_learning_rate_is_the_one_that_the_step_was_taken_with(fit, monkeypatch, micro_batch):
    used, step = [], torch.optim.AdamW.step

    def spy(optimizer, *args, **options):
        used.extend({group["lr"] for group in optimizer.param_groups})
        return step(optimizer, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    run_dir = fit(**{"data.micro_batch_size": micro_batch, "model.warmup_steps": 1})
    assert len({*used}) > 2
    assert column(run_dir, "learning_rate") == dict(enumerate(used, 1))
    scalars = EventAccumulator(str(run_dir)).Reload()
    assert [event.value for event in scalars.Scalars("other/learning_rate")] == pytest.approx(used)


def test_tensorboard_shows_what_was_logged_and_nothing_else(finished, capfd):
    scalars = EventAccumulator(str(finished)).Reload()
    tags = scalars.Tags()["scalars"]
    assert {tag.removeprefix("other/").removeprefix("per_head/") for tag in tags} == {*rows(finished)[0]} - {"step"}
    assert min(tags).startswith("loss/")
    assert "other/entropy/layer_01" < "per_head/entropy/layer_00/head_00" in tags
    assert "out of order" not in capfd.readouterr().err


def test_broken_loss_names_step_documents_and_checkpoint(fit):
    with pytest.raises(UserError) as error:
        fit(**{"model.learning_rate": 1e30, "trainer.max_steps": 9, "trainer.gradient_clip_val": "null"})
    message = str(error.value)
    assert message.startswith(("the loss is ", "the gradient is not finite at step "))
    assert "docs.jsonl line" in message
    assert "checkpoint" in message


class BrokenGradient(L.Callback):
    """One infinite gradient at the third step; the loss stays finite."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 2:
            gradient = next(pl_module.parameters()).grad
            assert gradient is not None
            gradient.view(-1)[0] = math.inf


def test_broken_weights_are_never_checkpointed(fit, tmp_path):
    callback = f"[{__name__}.BrokenGradient]"
    with pytest.raises(UserError, match=r"gradient is not finite at step 3; .*docs\.jsonl line.*step_00000002\.ckpt"):
        fit(**{"checkpoint.every_n_steps": 1, "trainer.callbacks": callback, "allow_code": "tests"})
    kept = checkpoints(tmp_path / "run")
    assert [path.name for path in kept] == ["step_00000001.ckpt", "step_00000002.ckpt"]
    for path in kept:
        assert all(tensor.isfinite().all() for tensor in read_checkpoint(path)["state_dict"].values())
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"


class BrokenWeights(L.Callback):
    """Weights are NaN after the last step, although its loss and gradient were finite."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == trainer.max_steps:
            next(pl_module.parameters()).data.fill_(math.nan)


def test_a_run_whose_last_evaluation_is_no_number_failed(fit, tmp_path):
    callback = f"[{__name__}.BrokenWeights]"
    with pytest.raises(UserError, match=r"loss/.* is not a finite number after the last step; .*step_00000002\.ckpt"):
        fit(**{"trainer.callbacks": callback, "allow_code": "tests"})
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"
    assert rows(tmp_path / "run")[-1]["loss/ood"] == "nan"
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_00000002.ckpt"]


def test_finished_run_says_so(fit, run_dir, capsys):
    before = (run_dir / "run.json").read_bytes()
    fit()
    assert (run_dir / "run.json").read_bytes() == before
    assert "already finished" in capsys.readouterr().out


def test_another_configuration_does_not_mix_with_a_run(fit, run_dir):
    with pytest.raises(UserError, match=r"\(model\.learning_rate was 0\.0003, is 0\.001\)"):
        fit(**{"model.learning_rate": 1e-3})


def test_only_the_newest_checkpoints_stay(fit):
    run_dir = fit(**{"checkpoint.every_n_steps": 1, "checkpoint.keep": 3})
    assert [path.name for path in checkpoints(run_dir)] == [f"step_0000000{step}.ckpt" for step in (2, 3, 4)]


def test_damaged_checkpoint_is_refused_and_the_previous_offered(fit, run_dir):
    older, newest = checkpoints(run_dir)
    newest.write_bytes(newest.read_bytes()[:-1000])
    with pytest.raises(UserError, match=f"{newest} is damaged.*{older}"):
        check_checkpoint(newest)
    set_status(run_dir, "running")
    with pytest.raises(UserError, match="is damaged"):
        fit()
    before = column(run_dir, "loss/train")
    newest.unlink()
    fit()  # from what was offered
    assert column(run_dir, "loss/train") == before


def test_a_run_may_go_on_elsewhere(fit, run_dir):
    stop_after(run_dir, 2)
    fit(**{"data.num_workers": 1, "checkpoint.keep": 1})
    assert max(column(run_dir, "loss/train")) == 4
    assert [path.name for path in checkpoints(run_dir)] == ["step_00000004.ckpt"]


def begin_again(fit, checkpoint):
    """The same command whenever it is called: a run that begins from a checkpoint of another."""
    return fit("again", **{"checkpoint.every_n_steps": 1}, ckpt_path=checkpoint)


def test_a_run_from_the_checkpoint_of_another_goes_on_from_its_own(fit, run_dir, capsys):
    run = begin_again(fit, checkpoints(run_dir)[0])
    assert "steps 2 to 4" in capsys.readouterr().out
    before = rows(run)
    stop_after(run, 3)
    begin_again(fit, checkpoints(run_dir)[0])
    said = capsys.readouterr().out
    assert "steps 3 to 4" in said
    assert f"{run} resumes from its own newest checkpoint, {run}/checkpoints/step_00000003.ckpt, not from" in said
    assert [row["loss/train"] for row in rows(run)] == [row["loss/train"] for row in before]


@pytest.fixture
def other_hold_out(shards, tmp_path):
    """Makes shards that differ in the hold-out of one domain, by one document."""

    def prepared(domain):
        texts = (f"document {number}\n" * 99 for number in itertools.count())
        text = next(text for text in texts if split_of(text.encode(), 0.3) == "holdout")
        root = shutil.copytree(shards, tmp_path / "other_shards")
        shutil.rmtree(root / domain)
        with (root / f"{domain}.jsonl").open("a") as file:
            file.write(json.dumps({"text": text}) + "\n")
        prepare([root / f"{domain}.jsonl"], root, domain, "byte", holdout=0.3, workers=1)
        return {"data.root": root}

    return prepared


@pytest.mark.parametrize("domain", ["docs", "code"])
def test_another_hold_out_does_not_mix_with_a_run(fit, run_dir, other_hold_out, domain):
    stop_after(run_dir, 2)
    before, other = (run_dir / "curves.csv").read_bytes(), other_hold_out(domain)
    with pytest.raises(UserError, match=f"has another hold-out of '{domain}' than {run_dir}: restore or rename it"):
        fit(**other)
    assert (run_dir / "curves.csv").read_bytes() == before
    new = fit("new", **other, ckpt_path=checkpoints(run_dir)[0])  # has curves of its own
    assert min(column(new, "loss/ood/code")) > 2


def test_a_checkpoint_of_an_earlier_version_does_not_say_what_its_hold_outs_are(fit, run_dir, other_hold_out):
    stop_after(run_dir, 2)
    (path,) = checkpoints(run_dir)
    content = torch.load(path, weights_only=True)
    assert content["seqarch"].pop("hold_outs").keys() == {"docs", "code"}
    torch.save(content, path)
    fit(**other_hold_out("code"))
    assert max(column(run_dir, "loss/train")) == 4


def test_a_pickle_with_code_is_refused(tmp_path):
    path = tmp_path / "step_00000001.ckpt"
    torch.save({"code": print}, path)
    with pytest.raises(UserError, match="is not a checkpoint of seqarch"):
        read_checkpoint(path)
    torch.save({"state_dict": {}}, path)
    with pytest.raises(UserError, match="seqarch is None"):
        read_checkpoint(path)


def test_model_flop_utilisation_is_the_share_of_the_peak(fit):
    run_dir = fit(**{"throughput.peak_tflops": 0.5})
    lm, _ = load(run_dir / "checkpoints/step_00000004.ckpt")
    rate = column(run_dir, "throughput/tokens_per_second")
    expected = {step: each * lm.flops_per_token(48, training=True) / 0.5e12 for step, each in rate.items()}
    assert column(run_dir, "throughput/mfu") == pytest.approx(expected)


def test_peak_memory_begins_with_the_run(monkeypatch):
    reset, model = [], mock.Mock(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr("seqarch.training.callbacks.throughput.clock", lambda device: 0.0)
    callback = Throughput(every_n_steps=0)
    data = mock.Mock(document_lengths=lambda: [8])
    model.lm.flops_per_token.return_value = 1.0
    callback.on_train_start(mock.Mock(callbacks=[], global_step=0, datamodule=data), model)
    assert reset == [model.device]
    assert callback.peak_tflops == 989


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 80GB HBM3", 989), ("Quadro 2000", None)],
)
def test_peaks_are_dense(name, peak):
    assert peak_tflops(name) == peak


def test_wrong_intervals_are_refused():
    with pytest.raises(UserError, match="every_n_steps"):
        OODLoss(every_n_steps=-1)
    with pytest.raises(UserError, match="peak_tflops"):
        Throughput(peak_tflops=0)
    with pytest.raises(UserError, match=r"RunCheckpoint\.keep must be at least 1"):
        RunCheckpoint(keep=0)

"""Training of recall exams, from a small model to the files of results."""

import csv
import dataclasses
import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from seqarch_recall import train as training
from seqarch_recall.figure import published, published_accuracy, recall_figure
from seqarch_recall.model import RecallLM, build, derived
from seqarch_recall.run import Point, table
from seqarch_recall.settings import find_settings
from seqarch_recall.train import Batch, Learner, share_of_rate, train

from seqarch import cli
from seqarch.errors import UserError
from seqarch.mixers.base import Mixer
from seqarch.versions import version

QUICK = {
    "options": {"vocab_size": 32, "noise": False},
    "train": [{"n": 256, "length": 16, "pairs": 2}],
    "test": [{"n": 64, "length": 16, "pairs": 2}, {"n": 64, "length": 32, "pairs": 4}],
    "rates": [0.001, 0.01],
    "epochs": 3,
    "batch": 64,
}


def flags(**changes):
    return [f"--{key}={json.dumps(value)}" for key, value in {**QUICK, "widths": [16], **changes}.items()]


def command(out, *more, mixers=("Attention",), **changes):
    return ["recall", "mqar", "--mixer", *mixers, "--out", str(out), *flags(**changes), *more]


@pytest.mark.commands
def test_attention_learns_and_stops(tmp_path):
    settings = find_settings(
        "mqar", "tiny", {**QUICK, "rates": [0.01], "train": [{"n": 1024, "length": 16, "pairs": 4}], "epochs": 30}
    )
    options = derived(settings, "Attention", 32, 16, {})
    model = build(settings, "Attention", 32, options, 32)
    testing = settings.testing()
    assert training.test(model, testing, exact=False).accuracy < 0.15  # 16 values
    reports = []
    done = train(settings, [Learner(model, 0.01, 0.1)], testing, tmp_path / "x.pt", reports.append)
    assert done.scores.accuracy >= 0.99
    assert done.epochs == len(reports) < 30
    assert done.scores.slices.keys() == {"2", "4"}


@pytest.mark.parametrize("core", ["Top1ChunkCore", {"class_path": "Top1ChunkCore", "init_args": {"chunk_size": 8}}])
def test_an_option_may_be_a_class(core):
    settings = find_settings("mqar", "tiny", QUICK)
    model = build(settings, "RWKV7Shell", 16, derived(settings, "RWKV7Shell", 16, 16, {"core": core}), 16)
    assert "Top1ChunkCore" in {type(each).__name__ for each in model.modules()}


@pytest.mark.commands
def test_an_interrupted_training_goes_on_with_the_same_numbers(tmp_path):
    settings = find_settings("mqar", "tiny", {**QUICK, "fresh": True})
    testing = settings.testing()

    def learners():
        options = derived(settings, "DeltaNet", 16, 16, {})
        return [Learner(build(settings, "DeltaNet", 16, options, 32), rate, 0.1) for rate in settings.rates]

    whole = learners()
    train(settings, whole, testing, tmp_path / "whole.pt", lambda _: None)

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.epochs == 2:
            raise Stop

    with pytest.raises(Stop):
        train(settings, learners(), testing, tmp_path / "parts.pt", stop)
    rest = learners()
    seen = []
    train(settings, rest, testing, tmp_path / "parts.pt", seen.append)
    assert [progress.epochs for progress in seen] == [2, 3]  # what was not reported is made again
    for one, other in zip(whole, rest, strict=True):
        for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("progress"),
        lambda state: state.update(learners=[]),
        lambda state: state["learners"][0][1]["state"][0].update(exp_avg=torch.zeros(3)),
    ],
)
def test_a_checkpoint_of_others_is_refused(tmp_path, change):
    """The last one would have the kernel of AdamW write past the end of its state."""
    settings = find_settings("mqar", "tiny", {**QUICK, "epochs": 1})
    learner = Learner(build(settings, "Attention", 16, derived(settings, "Attention", 16, 16, {}), 32), 0.01, 0.1)
    train(settings, [learner], settings.testing(), tmp_path / "x.pt", lambda _: None)
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    change(state)
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(UserError, match=r"x\.pt is not a checkpoint of this exam"):
        train(settings, [learner], [], tmp_path / "x.pt", lambda _: None)


def test_the_rate_follows_a_cosine_after_its_rise():
    settings = find_settings("mqar", "tiny", {"epochs": 20, "warmup": 0.1})
    assert [share_of_rate(settings, epoch) for epoch in (0, 1, 2, 11)] == pytest.approx([0.5, 1, 1, 0.5])
    plain = dataclasses.replace(settings, warmup=0.0)
    assert [share_of_rate(plain, epoch) for epoch in (0, 10)] == pytest.approx([1, 0.5])
    assert 0 < share_of_rate(plain, 19) < 0.01


def test_the_best_rate_counts(tmp_path, monkeypatch):
    settings = find_settings("mqar", "tiny", {**QUICK, "epochs": 2})
    options = derived(settings, "Attention", 16, 16, {})
    pair = [Learner(build(settings, "Attention", 16, options, 32), rate, 0.1) for rate in settings.rates]
    accuracies = iter([0.3, 0.2, 0.1, 0.4])
    scores = training.Scores(0.0, {}, {})
    monkeypatch.setattr(training, "test", lambda *_, **__: scores._replace(accuracy=next(accuracies)))
    done = train(settings, pair, [], tmp_path / "x.pt", lambda _: None)
    assert (done.rate, done.scores.accuracy) == (0.01, 0.4)


def test_a_model_that_is_never_right_has_its_rate_and_its_results(tmp_path, monkeypatch):
    settings = find_settings("mqar", "tiny", {**QUICK, "epochs": 2})
    learner = Learner(build(settings, "Attention", 16, derived(settings, "Attention", 16, 16, {}), 32), 0.01, 0.1)
    scores = training.Scores(0.0, {"2": 0.0, "4": 0.0}, {"tvd": 0.9})
    monkeypatch.setattr(training, "test", lambda *_, **__: scores)
    done = train(settings, [learner], [], tmp_path / "x.pt", lambda _: None)
    assert (done.rate, done.scores) == (0.01, scores)


def test_models_are_those_of_the_sources():
    settings = find_settings("mqar", "small", {})
    for mixer, kinds in (("DeltaNet", ["GatedConvolution", "DeltaNet"]), ("Mamba2", ["Mamba2", "Mamba2"])):
        model = build(settings, mixer, 64, derived(settings, mixer, 64, 256, {}), 1024)
        assert [type(block.mixer).__name__ for block in model.blocks] == kinds
        assert all(block.feed_forward is None for block in model.blocks)
        assert model.head.weight is model.embedding.weight
        assert model.dropout.p == 0.1
    assert derived(settings, "Attention", 64, 256, {}) == {"n_heads": 2, "position": "none"}
    assert derived(settings, "Top1Chunk", 128, 256, {})["chunk_size"] == 16
    zoology = find_settings("mqar", "zoology", {})
    attention = build(zoology, "Attention", 64, derived(zoology, "Attention", 64, 256, {}), 256)
    assert attention.positions is not None
    assert attention.positions.num_embeddings == 256
    assert [type(block.mixer).__name__ for block in attention.blocks] == ["Attention", "Attention"]


def test_states_are_counted_in_elements():
    settings = find_settings("mqar", "small", {})
    attention = build(settings, "Attention", 64, derived(settings, "Attention", 64, 256, {}), 1024)
    assert attention.state_elements(1024) == 2 * 64 * 1024 + 2 * 64
    delta = build(settings, "DeltaNet", 64, derived(settings, "DeltaNet", 64, 256, {"n_heads": 2}), 1024)
    assert delta.state_elements(1024) == 2 * 32 * 32 + 3 * 3 * 64 + 2 * 64


def test_logits_at_places_are_those_of_the_model():
    settings = find_settings("mqar", "tiny", {"dropout": 0.0})
    model = build(settings, "Attention", 32, derived(settings, "Attention", 32, 16, {}), 16)
    tokens = torch.randint(model.vocab_size, (2, 16))
    places = torch.tensor([[3, 7], [0, 15]])
    whole = model(tokens)
    torch.testing.assert_close(model.answers(tokens, places), torch.stack([whole[0, [3, 7]], whole[1, [0, 15]]]))


class OfTokens(Mixer):
    """Needs the ids of the tokens, and adds a loss."""

    def __init__(self, *place):
        super().__init__(*place)
        self.guess = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x, *, tokens, losses=None):
        if losses is not None:
            losses["guess"] = self.guess.square()
        return x * tokens[..., None]


def test_mixers_read_the_tokens_and_add_their_losses():
    model = RecallLM(32, 16, 2, {"mixer": OfTokens}, dropout=0.0)
    places = torch.tensor([[3, 7], [0, 8]])
    Learner(model, 0.01, 0.0).step(Batch(torch.randint(32, (2, 9)), places, places))
    assert [each.grad for name, each in model.named_parameters() if name.endswith("guess")] == [6, 6]


def test_published_points_have_the_state_of_their_configuration():
    points = published({"task": "mqar", "size": "small"})
    rows = {(row["model"], row["width"], row["option"]): int(row["elements"]) for row in points}
    assert rows["DeltaNet", "64", "n_heads=2"] == 2 * 32**2 + 3 * 64
    assert rows["DeltaNet", "256", "n_heads=2"] == 2 * 128**2 + 3 * 256
    assert rows["Mamba-2", "256", "d_state=16"] == 2 * 2 * 256 * 16
    assert rows["Based", "128", "feature_dim=16"] == (1 + 16 + 136) * 129 + 3 * 128
    assert rows["window attention", "128", "window=64"] == 2 * 128 * 64 + 3 * 128
    assert rows["Mamba", "64", "d_state=16"] == 2 * 2 * 64 * 16
    assert len(rows) == len(points) == 33


@pytest.mark.parametrize(
    ("kind", "width", "options", "accuracy"),
    [
        ("DeltaNet", 128, {"n_heads": 2}, 0.96),
        ("DeltaNet", 128, {"n_heads": 4}, None),
        ("Attention", 128, {"n_heads": 1, "window": 64}, 0.51),
        ("Attention", 128, {"n_heads": 2}, 1.0),
        ("Attention", 128, {"n_heads": 2, "window": 65}, None),
        ("Mamba2", 256, {"d_state": 24}, 0.84),
        ("RWKV6", 64, {"n_heads": 1}, None),
    ],
)
def test_published_points_are_found_by_their_configuration(kind, width, options, accuracy):
    point = {"class": kind, "width": width, "options": options}
    assert published_accuracy({**point, "settings": {"task": "mqar", "size": "small"}}) == accuracy
    assert published_accuracy({**point, "settings": {"task": "mqar", "size": "tiny"}}) is None


@pytest.mark.commands
def test_the_command_writes_results_and_finds_them_again(tmp_path, capsys):
    mixers = ("Attention", "Mamba2")
    assert cli.main(command(tmp_path, mixers=mixers, epochs=1)) in (0, None)
    said = capsys.readouterr().out
    folder = tmp_path / "recall" / "tiny"
    points = json.loads((folder / "mqar.json").read_text())["points"]
    assert [point["mixer"] for point in points] == ["Attention", "Mamba2"]
    for point in points:
        assert point["task"] == "mqar"
        assert point["width"] == 16
        assert point["finished"]
        assert point["slices"].keys() == {"2", "4"}
        assert 0 <= point["accuracy"] <= 1
        assert point["settings"]["epochs"] == 1
        assert point["versions"]["torch"] == version("torch")
        assert f"| {point['accuracy']:.3f}" in said
    assert (folder / "mqar.png").stat().st_size > 10_000
    with (folder / "mqar.csv").open() as file:
        assert [row["mixer"] for row in csv.DictReader(file)] == ["Attention", "Mamba2"]
    assert not list(folder.rglob("*.pt"))
    cli.main([*command(tmp_path, mixers=mixers, epochs=1), "--rates=[1e-3, 1e-2]"])
    assert "epoch 1" not in capsys.readouterr().out


@pytest.mark.commands
def test_a_point_that_was_stopped_before_its_last_report_is_reported(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("seqarch_recall.run.write_json", full)
        with pytest.raises(SystemExit):
            cli.main(command(tmp_path, epochs=1))
    cli.main(command(tmp_path, epochs=1))
    assert len(json.loads((tmp_path / "recall/tiny/mqar.json").read_text())["points"]) == 1


@pytest.mark.commands
def test_the_checkpoint_of_other_settings_is_not_continued(tmp_path, monkeypatch, capsys):
    """Nor where the file of the point, which notes the settings, was deleted or not yet written."""
    with monkeypatch.context() as patch:
        patch.setattr(training, "_epoch", epochs_until(2))
        with pytest.raises(ValueError, match="stop here"):
            cli.main(command(tmp_path, epochs=3))
    (point,) = tmp_path.rglob("Attention-16.json")
    assert len([*point.parent.glob("*.pt")]) == 1
    point.unlink()
    capsys.readouterr()
    cli.main(command(tmp_path, epochs=3, seed=1))
    assert "epoch 1," in capsys.readouterr().out
    assert json.loads(point.read_text())["epochs"] == 3
    point.unlink()
    cli.main(command(tmp_path, epochs=3))  # the settings of the checkpoint
    said = capsys.readouterr().out
    assert "epoch 1," not in said
    assert "epoch 2," in said


def epochs_until(last):
    """`_epoch` of the training, which stops before that epoch."""
    epoch, done = training._epoch, []

    def run(*args):
        done.append(args)
        if len(done) == last:
            raise ValueError("stop here")
        epoch(*args)

    return run


def test_an_option_of_the_mixer_does_not_hide_a_setting_of_its_name():
    settings = find_settings("mqar", "tiny", {})
    found = {
        Point(dataclasses.replace(settings, conv=conv), "Mamba2", "Mamba2", 16, {"conv": True}, Path()).fingerprint
        for conv in (False, True)
    }
    assert len(found) == 2


def test_a_table_of_points_of_which_some_have_a_distance_to_the_truth():
    point = {"mixer": "Attention", "class": "Attention", "width": 16, "state_elements": 8, "accuracy": 0.5, "rate": 0.1}
    point |= {"slices": {}, "epochs": 1, "seconds": 2, "finished": True, "settings": {"task": "icll", "size": "tiny"}}
    _, _, with_tvd, without = (line.split("|")[5].strip() for line in table([{**point, "tvd": 0.25}, point]))
    assert (with_tvd, without) == ("0.250", "")


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    """The folder of a recall exam of one epoch."""
    folder = tmp_path_factory.mktemp("examined")
    cli.main(command(folder, epochs=1))
    return folder


@pytest.fixture
def copied(examined, tmp_path, capsys):
    """A copy of that folder, to damage."""
    shutil.copytree(examined, tmp_path, dirs_exist_ok=True)
    capsys.readouterr()
    return tmp_path


def test_points_of_other_settings_are_refused_before_any_is_trained(copied, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command(copied, epochs=2), "--widths=[8,16]"])
    assert stop.value.code == 2
    assert "Attention-16.json is another point, it was made with another recipe or data" in capsys.readouterr().err
    assert [path.name for path in copied.glob("recall/tiny/mqar/*.json")] == ["Attention-16.json"]


@pytest.mark.parametrize("at", [16, 8])
@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ("{", "is not JSON"),
        ({"accuracy": None}, "not a point of a recall exam (see its accuracy): remove"),
        ({"slices": [1]}, "not a point of a recall exam (see its slices): remove"),
        ({"state_elements": "many"}, "not a point of a recall exam (see its state_elements): remove"),
        ({}, "(see its fingerprint, settings): remove"),
    ],
)
def test_damaged_points_are_named(copied, capsys, facts, said, at):
    path = copied / "recall/tiny/mqar/Attention-16.json"
    point = json.loads(path.read_text())
    if not facts:
        del point["fingerprint"], point["settings"]
    damaged = path.with_name(f"Attention-{at}.json")
    damaged.write_text(facts if isinstance(facts, str) else json.dumps({**point, **facts}))
    with pytest.raises(SystemExit) as stop:
        cli.main(command(copied, epochs=1))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert str(damaged) in error
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--against", "Mamba2"], "unknown option --against"),
        (["--epoch=1"], "unknown option --epoch"),
        (["--seed"], "--seed needs a value"),
        (["--stop", ".nan"], "stop must be an accuracy"),
        (["--mixer.heads=3"], "unknown option of Attention --mixer. 'heads': did you mean n_heads"),
        (["--mixer.window=x"], "mixer.window is x: expected a whole number"),
        (["--mixer.d_model=8"], "mixer has no option 'd_model'"),
        (["--dropout=x"], "recall.dropout is x: expected a number"),
        (["--mixer", "Attentio"], "unknown mixer 'Attentio': did you mean Attention"),
        (["--out", "/proc/none"], "/proc/none: No such file or directory; choose another place"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path, capsys, more, said):
    with pytest.raises(SystemExit) as stop:
        cli.main(command(tmp_path, *more))
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_an_unknown_mixer_leaves_no_folder(tmp_path):
    with pytest.raises(SystemExit):
        cli.main(command(tmp_path / "out", mixers=("Attentio",)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("link", ["recall", "recall/tiny", "recall/tiny/mqar", "recall/tiny/mqar.json"])
def test_a_folder_of_exams_holds_no_link_that_leads_out(tmp_path, capsys, link):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / link).parent.mkdir(parents=True)
    (tmp_path / "out" / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SystemExit):
        cli.main(command(tmp_path / "out"))
    assert f"out/{link} is a link that leads out of" in capsys.readouterr().err
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_no_task_means_all_of_them(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["recall", "--mixer", "Attention", "--out", str(tmp_path), "--options={vocab_size: 64}"])
    assert "ngram has no option 'vocab_size'" in capsys.readouterr().err


def test_the_figure_shows_published_points_only_at_the_published_setting():
    point = {"mixer": "DeltaNet", "class": "DeltaNet", "state_elements": 2752, "accuracy": 0.8}
    point |= {"test_length": 1024, "options": {"n_heads": 2}, "finished": True}
    for size, labels in (("tiny", 1), ("small", 1 + 9)):
        settings = dataclasses.asdict(find_settings("mqar", size, {}))
        figure = recall_figure([{**point, "settings": settings}])
        (axes,) = figure.axes
        assert len(axes.lines) == labels
        assert axes.get_xscale() == "log"
        assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[2752, 0.8]]


def test_the_figure_marks_points_that_ended_early():
    settings = dataclasses.asdict(find_settings("mqar", "tiny", {}))
    first = {"class": "Mamba2", "state_elements": 5056, "accuracy": 0.7, "test_length": 64, "options": {}}
    based = {**first, "class": "Based", "state_elements": 999, "options": {"window": 16}, "settings": settings}
    (axes,) = recall_figure([{**first, "settings": settings, "finished": False}, {**based, "finished": True}]).axes
    *others, rings = axes.lines
    assert rings.get_label() == "stopped early"
    assert np.asarray(rings.get_xydata()).tolist() == [[5056, 0.7]]
    assert [line.get_label() for line in others] == ["Mamba2", "Based"]  # its window makes Based no window attention


def test_the_figure_names_the_epochs_and_lengths_of_all_points():
    point = {"class": "Mamba2", "state_elements": 5056, "accuracy": 0.7, "options": {}, "finished": True}
    points = [
        {**point, "test_length": length, "settings": {"task": "icll", "size": "tiny", "epochs": epochs}}
        for length, epochs in ((64, 8), (1024, 32), (64, 32))
    ]
    (axes,) = recall_figure(points).axes
    assert axes.get_title() == "icll, setting tiny, at most 8 or 32 epochs"
    assert axes.get_xlabel() == "state of all layers at 64 or 1,024 tokens (elements)"

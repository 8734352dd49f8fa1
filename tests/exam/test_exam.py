"""What an exam keeps, reuses, says and refuses, on models that train for a second."""

import errno
import json
import re
import shutil

import numpy as np
import pytest
import yaml

from seqarch.errors import UserError
from seqarch.exam import pool
from seqarch.exam.derive import load_size
from seqarch.exam.plan import remember
from seqarch.exam.verdict import LIMITS
from seqarch.experiment.experiment import Experiment
from seqarch.runs.folder import read_note, write_note
from tests.exam.conftest import SHRUNK, InProcess, examiner

pytestmark = pytest.mark.commands

TOP1 = ("--mixer", "Top1Chunk", "--mixer.chunk_size", "16")
BRIEF = {"trainer.max_steps": "2", "branches.at": "[]"}
"""For exams whose losses do not matter."""


@pytest.fixture(scope="module")
def made(shards, tmp_path_factory):
    """The parent folder of an exam of `TOP1` and of its cache, for tests that only read."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        examiner(shards, folder, patch)(*TOP1)
    return folder


@pytest.fixture
def finished(made, tmp_path):
    """A copy of that exam where the next exam of the test writes; its cache names the first exam's run."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out/tiny"


@pytest.fixture
def trained(monkeypatch):
    """The run folders that are trained, in order."""
    runs = []
    fit = InProcess.fit

    def noted(self, args):
        if isinstance(args, list):
            runs.append(run_folder(args))
        fit(self, args)

    monkeypatch.setattr(InProcess, "fit", noted)
    return runs


@pytest.fixture
def asked(monkeypatch):
    """The run folders that an exam wants to train, in order. None is trained, so the exam fails."""
    runs = []

    def noted(self, args):
        if isinstance(args, list):
            runs.append(run_folder(args))
            raise UserError("not this time")

    monkeypatch.setattr(InProcess, "fit", noted)
    return runs


def run_folder(args):
    return next(arg for arg in args if arg.startswith("--run_dir")).rpartition("tiny/")[2]


def test_an_exam_judges_the_candidate_and_keeps_no_checkpoints(made):
    folder = made / "out/tiny"
    verdict = json.loads((folder / "Top1Chunk-chunk_size=16/verdict.json").read_text())
    assert verdict["parameters"]["ratio"] == 1.0
    assert verdict["missing"] == []
    assert not (folder / "transformer_pp/seed_0/checkpoints").exists()


def test_the_minutes_of_an_attempt_are_added_to_those_before(exam, monkeypatch, tmp_path):
    def stopped(self, args):
        if isinstance(args, list):
            raise UserError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "fit", stopped)
        with pytest.raises(UserError, match="stopped"):
            exam(*TOP1, **BRIEF)
    run = tmp_path / "out/tiny/transformer_pp/seed_0"
    write_note(run, minutes=5.0)
    exam(*TOP1, **BRIEF)
    assert 5 < read_note(run)["minutes"] < 6
    assert read_note(run)["start"] is None


def test_finished_runs_are_kept(exam, finished, trained, capsys):
    exam(*TOP1)
    assert trained == []
    assert "already finished" in capsys.readouterr().out


def test_a_verdict_counts_all_finished_seeds_of_the_folder(exam, finished, trained):
    text = exam(*TOP1, "--seeds", "2") / "Top1Chunk-chunk_size=16/verdict.json"
    before = text.read_bytes()
    assert json.loads(before)["finished"]["seeds"] == [0, 1]
    exam(*TOP1, "--seeds", "1")
    assert trained == ["transformer_pp/seed_1", "Top1Chunk-chunk_size=16/seed_1"]
    assert text.read_bytes() == before


def test_a_seed_of_one_model_alone_changes_no_verdict(exam, finished):
    text = finished / "Top1Chunk-chunk_size=16/verdict.json"
    before = json.loads(text.read_text())
    exam("--mixer", "Attention", "--mixer.window", "8", "--seeds", "2")
    assert (finished / "transformer_pp/seed_1/run.json").is_file()
    exam(*TOP1, "--seeds", "1")
    assert json.loads(text.read_text()) == {**before, "folder": str(text.parent)}


def test_a_finished_run_of_another_exam_counts_at_no_seed(exam, finished):
    for model in ("Top1Chunk-chunk_size=16", "transformer_pp"):
        shutil.copytree(finished / model / "seed_0", finished / model / "seed_1")
    with pytest.raises(UserError, match="seed_1 is not a run of this exam, it was made with another recipe or data"):
        exam(*TOP1, "--seeds", "1")


def test_the_reference_serves_every_exam(exam, made, finished, trained):
    folder = exam("--mixer", "Attention", "--mixer.window", "8", out="elsewhere")
    assert trained == ["Attention-window=8/seed_0"]
    first, other = (parent / "transformer_pp/seed_0" for parent in (made / "out/tiny", folder))
    kept, copied = ({path.name for path in run.iterdir()} for run in (first, other))
    assert {name.partition(".")[0] for name in kept - copied} == {"events"}
    assert read_note(other)["reused_from"] == str(first)
    for name in ("curves.csv", "run.json"):
        assert (other / name).read_bytes() == (first / name).read_bytes()


def test_the_reference_is_trained_again_for_another_recipe_and_where_its_run_is_gone(exam, finished, asked):
    reference = finished / "transformer_pp/seed_0"
    with pytest.raises(UserError, match="not this time"):
        exam(*TOP1, out="faster", **{"model.learning_rate": "5e-3"})
    assert asked == ["transformer_pp/seed_0", "Top1Chunk-chunk_size=16/seed_0"]
    remember(reference, read_note(reference)["fingerprint"])
    shutil.rmtree(finished.parent)
    with pytest.raises(UserError, match="not this time"):
        exam(*TOP1, out="again")
    assert asked[2:] == ["transformer_pp/seed_0", "Top1Chunk-chunk_size=16/seed_0"]


def test_another_length_has_its_own_folder_and_says_how_many_documents_are_that_long(exam, asked, capsys):
    with pytest.raises(UserError, match="not this time"):
        exam(*TOP1, "--length", "24")
    runs = [run.rpartition("tiny-24/")[2] for run in asked]
    assert runs == ["transformer_pp/seed_0", "Top1Chunk-chunk_size=16/seed_0"]
    said = re.search(r"docs: documents of at least 24 tokens: ([\d,]+) of ([\d,]+) \(train\)", capsys.readouterr().out)
    assert said is not None
    assert 0 < int(said[1].replace(",", "")) <= int(said[2].replace(",", ""))


def test_a_link_that_leads_out_of_the_folder_is_refused(exam, finished, tmp_path, asked):
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(finished / "transformer_pp")
    (finished / "transformer_pp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"tiny/transformer_pp is a link that leads out of"):
        exam(*TOP1)
    assert list((tmp_path / "elsewhere").iterdir()) == asked == []


def test_a_folder_of_exams_holds_no_link_that_leads_out(exam, tmp_path, asked):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/tiny").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="out/tiny is a link that leads out of"):
        exam(*TOP1)
    assert list((tmp_path / "elsewhere").iterdir()) == asked == []


def test_the_folder_that_you_name_may_be_a_link(exam, finished, tmp_path, trained):
    finished.parent.rename(tmp_path / "elsewhere")
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    exam(*TOP1)
    assert trained == []


def test_runs_of_another_exam_are_refused(exam, finished):
    with pytest.raises(UserError, match="it was made with another recipe or data: choose another --out"):
        exam(*TOP1, **{"model.learning_rate": "5e-3"})
    (finished / "transformer_pp/seed_0/exam.json").unlink()
    with pytest.raises(UserError, match=r"it has no exam.json"):
        exam(*TOP1)


def test_runs_with_the_sample_order_of_another_place_are_refused(exam, finished, monkeypatch):
    """On object storage samples are shuffled by default in windows."""
    monkeypatch.setattr("seqarch.data.datamodule.is_remote", lambda root: True)
    with pytest.raises(UserError, match="it was made with another recipe or data"):
        exam(*TOP1)


def test_runs_of_other_code_are_refused_and_the_reference_is_trained_again(exam, finished, asked, monkeypatch):
    monkeypatch.setattr("seqarch.exam.run.code_digest", lambda packages: "later")
    with pytest.raises(UserError, match="the code of seqarch or of the model has changed since it was made: choose"):
        exam(*TOP1)
    assert asked == []
    with pytest.raises(UserError, match="not this time"):
        exam(*TOP1, out="later")
    assert asked == ["transformer_pp/seed_0", "Top1Chunk-chunk_size=16/seed_0"]


def test_a_failed_run_is_one_line_and_the_others_are_judged(exam, finished, capsys, monkeypatch):
    fit = InProcess.fit

    def broken(self, args):
        if any("window=8/seed_0" in arg for arg in args):
            raise UserError("its process was ended by SIGKILL,\n usually for \x1b[2J lack of memory")
        fit(self, args)

    monkeypatch.setattr(InProcess, "fit", broken)
    with pytest.raises(UserError, match=r"Attention-window=8/seed_0 not finished \(its process was ended by SIGKILL"):
        exam("--mixer", "Attention", "--mixer.window", "8")
    said = capsys.readouterr().out
    assert (
        "[2/2] Attention-window=8, seed 0: failed: its process was ended by SIGKILL, usually for ?[2J lack of memory"
        in said
    )
    assert "\x1b" not in said
    assert "There is no verdict yet: a finished run of each model is needed." in said
    assert "Missing: " in said
    monkeypatch.setattr(InProcess, "fit", fit)
    verdict = json.loads(
        (exam("--mixer", "Attention", "--mixer.window", "8") / "Attention-window=8/verdict.json").read_text()
    )
    assert verdict["missing"] == []


def test_all_models_are_tried_out_and_those_that_fail_refused_together(exam, trained, tmp_path, monkeypatch, capsys):
    def refused(self, x, **options):
        raise UserError(f"Top1Chunk needs a GPU, not {x.device.type}")

    def broken(self, x, **options):
        raise RuntimeError("shapes 3 and 4\ndo not fit")

    monkeypatch.setattr("seqarch.mixers.attention.Top1Chunk.forward", refused)
    monkeypatch.setattr("seqarch.mixers.attention.Top1Element.forward", broken)
    said = "^2 of 4 models cannot be trained here: correct or omit them"
    with pytest.raises(UserError, match=said) as error:
        exam("--mixer", "Top1Chunk", "Top1Element", "window_256", **BRIEF)
    assert error.value.__notes__ == [
        "Top1Chunk: Top1Chunk needs a GPU, not cpu",
        "Top1Element: RuntimeError: shapes 3 and 4",
    ]
    lines = [line for line in capsys.readouterr().out.splitlines() if "trial" in line]
    assert [line.partition(" after ")[0] for line in lines] == [
        "[1/4] transformer_pp, trial: passed",
        "[2/4] Top1Chunk, trial: failed: Top1Chunk needs a GPU, not cpu",
        "[3/4] Top1Element, trial: failed: RuntimeError: shapes 3 and 4",
        "[4/4] window_256, trial: passed",
    ]
    assert trained == []
    assert [path.name for path in (tmp_path / "out/tiny").iterdir()] == [".lock"]
    exam("--mixer", "window_256", **BRIEF)
    assert len(trained) == 2


def test_all_that_is_refused_cheaply_is_refused_before_a_trial(exam, finished, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(InProcess, "fit", lambda self, args: pytest.fail("it was tried out"))
    with pytest.raises(UserError, match="it was made with another recipe or data"):
        exam("--mixer", "Attention", "--mixer.window", "8", **{"model.learning_rate": "5e-3"})
    folder = finished / "window_256/seed_0"
    folder.parent.mkdir()
    shutil.copytree(finished / "transformer_pp/seed_0", folder)
    with pytest.raises(UserError, match="window_256/seed_0 is not a run of this exam, it was made with another recipe"):
        exam("--mixer", "window_256")


def test_models_are_checked_before_text_is_prepared(exam, shards, tmp_path, capsys):
    with pytest.raises(UserError, match="n_heads=7 does not divide d_model=32"):
        exam("--mixer", "Top1Chunk", "--mixer.n_heads", "7", "--data", str(texts_of(shards, tmp_path)))
    assert "preparing" not in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_only_models_that_are_to_be_trained_are_tried_out(exam, finished, trained, monkeypatch):
    tried = []
    monkeypatch.setattr(Experiment, "try_out", lambda self: tried.append(self.options.model.mixers))
    exam(*TOP1)
    assert tried == []
    exam("--mixer", "Attention", "--mixer.window", "8", out="elsewhere")
    assert len(tried) == len(trained) == 1  # the reference comes from the first exam


def test_a_run_that_never_took_a_step_blocks_no_other_exam_and_no_figures_are_promised(exam, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("seqarch.training.LanguageModel.training_step", lambda *args: 1 / 0)
        with pytest.raises(UserError, match=r"not finished \(ZeroDivisionError: division by zero\)"):
            exam(*TOP1, **BRIEF)
    said = capsys.readouterr().out
    assert "/verdict.md, verdict.json\n" in said
    assert "scatter.png" not in said
    exam(*TOP1, **{**BRIEF, "model.learning_rate": "5e-3"})
    assert "/verdict.md, verdict.json, index.html, scatter.png\n" in capsys.readouterr().out


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device", "curves.csv")


def test_a_full_disk_ends_a_run_in_one_line(exam, capsys, monkeypatch):
    monkeypatch.setattr("seqarch.experiment.experiment.Experiment", full)
    assert pool.fit([]) == "curves.csv: No space left on device; make room, or choose another place"
    assert not capsys.readouterr().err
    monkeypatch.setattr(InProcess, "fit", full)
    monkeypatch.setattr("seqarch.exam.train.write_note", full)
    with pytest.raises(OSError, match="No space left") as error:  # which the command line says in one line
        exam(*TOP1, **BRIEF)
    assert error.value.errno == errno.ENOSPC


def test_of_a_bug_the_first_line_is_said_and_the_rest_traced(capsys, monkeypatch):
    def broken(args):
        raise RuntimeError("a compiler failed\nand dumps its graph")

    monkeypatch.setattr("seqarch.experiment.experiment.Experiment", broken)
    assert pool.fit([]) == "RuntimeError: a compiler failed"
    assert "and dumps its graph" in capsys.readouterr().err


def test_several_candidates_are_judged_one_by_one_and_drawn_together(exam, finished, capsys):
    shutil.rmtree(finished / "Top1Chunk-chunk_size=16")
    folder = exam("--mixer", "window_256", "gated_delta_net")
    assert {path.parent.name for path in folder.glob("*/verdict.md")} == {"window_256", "gated_delta_net"}
    assert f"all models together: {folder / 'report/index.html'}" in capsys.readouterr().out
    assert "gated_delta_net against transformer_pp" in (folder / "gated_delta_net/verdict.md").read_text()
    words = (folder / "gated_delta_net/verdict.md").read_text()
    assert ("Warning: gated_delta_net has" in words) == (
        abs(json.loads((folder / "gated_delta_net/verdict.json").read_text())["parameters"]["ratio"] - 1) > 0.1
    )


def test_without_finished_models_there_is_a_draft_or_the_reason_why_not(exam):
    options = {"model.learning_rate": "1e-6", "trainer.max_steps": "6", "branches.at": "[]"}
    folder = exam(*TOP1, **options) / "Top1Chunk-chunk_size=16"
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["draft"] is verdict["finished"] is None
    assert verdict["conclusion"].startswith("No gap for 'Top1Chunk-chunk_size=16' against 'transformer_pp'")
    assert "verdict" not in (folder / "verdict.md").read_text()


def test_the_first_line_says_what_a_tiny_exam_can_show(made):
    folder = made / "out/tiny/Top1Chunk-chunk_size=16"
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["finished"]["settled"] is False
    first = (folder / "verdict.md").read_text().splitlines()[2]
    assert first == verdict["conclusion"]
    assert re.match(
        f"{LIMITS['tiny']}: Top1Chunk-chunk_size=16 (cannot be told apart from|is .*) transformer_pp: ", first
    )


def test_losses_of_sequences_are_kept_at_every_evaluation(made):
    run = made / "out/tiny/transformer_pp/seed_0"
    files = sorted((run / "evaluations").glob("*.npz"))
    steps, points = (yaml.safe_load(SHRUNK[key]) for key in ("trainer.max_steps", "ood_loss.at"))
    assert [int(path.stem[5:]) for path in files] == [round(steps * share) for share in points]
    with np.load(files[-1]) as arrays:
        assert set(arrays.files) == {f"{kind}/{name}" for kind in ("loss", "document") for name in SETS}
        losses = arrays["loss/ood/code"]
        assert losses.shape == arrays["document/ood/code"].shape == (10,)
        assert (np.diff(arrays["document/ood/code"]) >= 0).all()
    last = (run / "curves.csv").read_text().splitlines()
    column = last[0].split(",").index("loss/ood/code")
    assert losses.mean() == pytest.approx(float(last[-1].split(",")[column]), abs=1e-6)


@pytest.mark.parametrize(("size", "count", "step"), [("draft", 23, 0.04), ("tiny", 11, 0.08)])
def test_evaluations_lie_evenly_after_the_first_tenth(size, count, step):
    points = [*(0.1 + step * k for k in range(count)), 1.0]
    assert load_size(size, {}).recipe["ood_loss"]["at"] == pytest.approx(points)


SETS = ("in_domain/docs", "ood/code")


def texts_of(shards, folder):
    """A folder with the text of the domains."""
    texts = folder / "texts"
    texts.mkdir()
    for name in ("docs", "code"):
        shutil.copy(shards / f"{name}.jsonl", texts)
    return texts


def test_text_files_are_prepared_once(exam, shards, tmp_path, capsys):
    texts = texts_of(shards, tmp_path)
    exam(*TOP1, "--data", str(texts), **BRIEF)
    assert (tmp_path / "out/shards/code/manifest.json").is_file()
    assert "preparing docs from docs.jsonl" in capsys.readouterr().out
    exam(*TOP1, "--data", str(texts), **BRIEF)
    assert "preparing" not in capsys.readouterr().out


def test_data_of_too_large_a_tokenizer_is_refused_before_training(exam, asked, monkeypatch):
    monkeypatch.setattr("seqarch.data.tokenizers.ByteTokenizer.vocab_size", 32000)
    with pytest.raises(UserError, match=r"tokenizer 'byte' has 32,000 tokens: set model.vocab_size, 257, to that"):
        exam(*TOP1)
    assert asked == []


def test_another_exam_in_the_same_folder_waits(exam, tmp_path):
    import filelock

    (tmp_path / "out/tiny").mkdir(parents=True)
    with filelock.FileLock(tmp_path / "out/tiny/.lock"), pytest.raises(UserError, match="another exam writes into"):
        exam(*TOP1)

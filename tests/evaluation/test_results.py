"""`seqarch eval`: results of a checkpoint, continuing after an interruption, and refusals."""

import json
import re
from importlib.metadata import entry_points

import numpy as np
import pytest
import torch
from scipy.stats import binom

from seqarch import cli
from seqarch.data.datamodule import TextDataModule
from seqarch.data.prepare import prepare
from seqarch.data.tokenizers import ByteTokenizer
from seqarch.errors import SeqarchWarning, UserError
from seqarch.evaluation import Asked, LossByDomain, RepeatGain, Scorer, Scores, Task, partial
from seqarch.evaluation import scorer as scorer_module
from seqarch.evaluation.cloze import Cloze
from seqarch.evaluation.long_documents import LongDocuments
from seqarch.evaluation.partial import Partial
from seqarch.evaluation.passkey import Passkey
from seqarch.evaluation.registry import tasks_named, with_rows
from seqarch.evaluation.results import evaluate_into, values
from seqarch.experiment.evaluate import _data, evaluate_checkpoint, open_checkpoint
from seqarch.mixers.attention import Attention
from seqarch.model import SequenceLM
from seqarch.model.lm import MixerFactory
from seqarch.report.findings import Findings
from seqarch.runs.curves import read_curves
from seqarch.runs.results import Value, interval, newest_results
from tests.conftest import MODEL, TINY, flags
from tests.evaluation.test_scorer import small_lm
from tests.report.runs_for_tests import write_run


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """A run folder of four steps with two checkpoints; tests write their results elsewhere."""
    run = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.experiment.run.report", lambda runs, out: [out / "index.html"])
        cli.run(["fit", *flags(**{**TINY, **MODEL, "data.root": shards, "run_dir": run})])
    return run


def test_the_loss_of_a_checkpoint_is_the_one_in_its_curves(trained, tmp_path):
    (result,) = evaluate_checkpoint(trained, [LossByDomain()], tmp_path)
    assert (result.step, result.content["precision"], result.content["tokenizer"]) == (4, "32-true", "byte")
    curves, *_ = read_curves(trained / "curves.csv")
    for tag in ("loss/in_domain/docs", "loss/ood/code"):
        assert result.metrics[tag].value == pytest.approx(curves[tag].value[-1], abs=1e-4)
        assert result.samples[tag].mean() == pytest.approx(result.metrics[tag].value, rel=1e-6)
    opened = open_checkpoint(trained)
    data = _data(opened, None)
    (rows,) = (each.tokens for each in data.evaluation_sets() if each.domain == "docs")
    with torch.no_grad():
        logits = opened.scorer.lm(rows[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:])
    assert curves["loss/in_domain/docs"].value[-1] == pytest.approx(float(loss), abs=1e-4), "both by the same scorer"


class Coin(Task):
    """A task with `n` samples, of which the first `right` are right."""

    reads_data = False
    version = 3
    scored = 0

    def __init__(self, right: int = 3, n: int = 8, stop_at: int | None = None) -> None:
        self.right, self.n, self.stop_at = right, n, stop_at

    @property
    def name(self):
        return f"coin_{self.right}"

    def score(self, scorer):
        if self.right == self.stop_at:
            raise KeyboardInterrupt
        Coin.scored += 1
        right = np.arange(self.n) < self.right
        return Scores({self.name: float(right.mean())}, {self.name: right}, {self.name: 0.5})


def test_an_interrupted_evaluation_goes_on(trained, tmp_path):
    Coin.scored = 0
    with pytest.raises(KeyboardInterrupt):
        evaluate_checkpoint(trained, [Coin(1), Coin(2), Coin(3, stop_at=3)], tmp_path)
    assert Coin.scored == 2
    results = evaluate_checkpoint(trained, [Coin(1), Coin(2)], tmp_path)
    assert Coin.scored == 2, "what is there is not scored again"
    assert [result.task for result in results] == ["coin_1", "coin_2"]
    assert newest_results(tmp_path).keys() == {"coin_1", "coin_2"}, "nothing of the third"


@pytest.mark.commands
@pytest.mark.parametrize("killed", [True, False])
def test_an_interrupted_task_goes_on_within_itself(killed, tmp_path, monkeypatch):
    """Killed after a write, or interrupted in time to write: it measures no row twice and gives the same scores."""
    texts = [f"Report {'of ' * n}\nDevice: X{n}\nDevice:" for n in range(4)]
    rows = [json.dumps({"text": text, "key": "Device", "value": "X"}) for text in texts]
    (tmp_path / "fda.jsonl").write_text("\n".join(rows))
    task, scorer = Cloze("fda", folder=str(tmp_path)), Scorer(small_lm(vocab=257), ByteTokenizer(), max_tokens=1)
    whole = evaluate_into(tmp_path / "whole", 1, [task], scorer, None, {})
    calls, generate, stop_at = [], scorer_module.generate, 3
    hook = lambda lm, args, options: calls.append("read") if "at" in options else None  # noqa: E731
    scorer.lm.register_forward_pre_hook(hook, with_kwargs=True)

    def counted(*args, **options):
        calls.append("write")
        if calls.count("write") == stop_at:
            raise KeyboardInterrupt
        return generate(*args, **options)

    def run(checkpoint="a"):
        calls.clear()
        return evaluate_into(tmp_path / "out", 1, [task], scorer, None, {"checkpoint": checkpoint})

    monkeypatch.setattr(scorer_module, "generate", counted)
    with monkeypatch.context() as patch:
        patch.setattr(partial, "SAVE_SECONDS", 0 if killed else 1e9)
        if killed:
            patch.setattr(Partial, "__exit__", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            run()
    stop_at = None
    assert (calls.count("read"), calls.count("write")) == (5, 3), "four prompts, and the question that all have"
    left = tmp_path / "out/evaluations/step_00000001/fda.partial"
    kept = left.read_bytes()
    (result,) = run(checkpoint="b")
    assert (calls.count("read"), calls.count("write")) == (5, 4), "nothing of another checkpoint"
    result.path.unlink()
    left.write_bytes(kept)
    (result,) = run()
    assert (calls.count("read"), calls.count("write")) == (0, 2)
    assert result.metrics == whole[0].metrics
    assert all((each == whole[0].samples[tag]).all() for tag, each in result.samples.items())
    assert not left.exists()


def test_a_result_of_other_settings_is_not_taken_for_it(trained, tmp_path):
    evaluate_checkpoint(trained, [Coin(1)], tmp_path)
    with pytest.raises(UserError, match=r"was measured with settings .*'n': 8.*, not .*'n': 9.*: remove it, or set"):
        evaluate_checkpoint(trained, [Coin(1, n=9)], tmp_path)
    with pytest.raises(UserError, match="was measured with prefix eos, not none"):
        evaluate_checkpoint(trained, [Coin(1)], tmp_path, prefix=False)
    with pytest.raises(UserError, match="was measured with checkpoint"):
        evaluate_checkpoint(trained / "checkpoints/step_00000002.ckpt", [Coin(1)], tmp_path) if move(tmp_path) else None


def move(folder):
    """Call the results of step 4 those of step 2."""
    return (folder / "evaluations/step_00000004").rename(folder / "evaluations/step_00000002")


def test_a_result_file_says_what_was_measured(trained, tmp_path):
    (result,) = evaluate_checkpoint(trained, [Coin(3)], tmp_path)
    content = json.loads((tmp_path / "evaluations/step_00000004/coin_3.json").read_text())
    assert content["version"] == 3
    assert content["settings"] == {"right": 3, "n": 8, "stop_at": None}
    assert len(content["checkpoint"]) == 64
    value = result.metrics["coin_3"]
    assert (value.value, value.n, value.chance, value.at_chance) == (0.375, 8, 0.5, True)
    assert result.samples["coin_3"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_intervals_cover_the_mean_as_often_as_they_say():
    random = np.random.default_rng(0)
    of_counts = np.array([interval(np.arange(200) < count) for count in range(201)])
    for p in (0.02, 0.25, 0.9):
        hits = (of_counts[:, 0] <= p) & (p <= of_counts[:, 1])
        assert 0.93 < binom.pmf(np.arange(201), 200, p) @ hits < 0.975
    hits = [low <= 1 <= high for low, high in (interval(random.exponential(size=300)) for _ in range(2000))]
    assert 0.93 < np.mean(hits) < 0.965
    for n in (*range(1, 20), 100, 1000):
        assert interval(np.zeros(n))[0] == 0, f"0 of {n} holds 0, the chance of a passkey"
        assert interval(np.ones(n))[1] == 1
    assert interval(np.zeros(10))[1] == pytest.approx(0.2775, abs=1e-3), "Wilson's interval at 0 of 10"


def test_a_gain_of_nothing_has_not_the_interval_of_a_share(tmp_path):
    """A model of equal guesses gains 0 in each row. Two seeds of it do not make a share of the gain either."""
    row = {"text": "Report\nDevice: X\nDevice:", "key": "Device", "value": "X"}
    (tmp_path / "fda.jsonl").write_text(10 * f"{json.dumps(row)}\n")
    task, lm = Cloze("fda", folder=str(tmp_path)), small_lm(vocab=257)
    torch.nn.init.zeros_(lm.head.weight)
    runs = [write_run(tmp_path / f"{seed}", "equal", seed=seed) for seed in range(2)]
    for run in runs:
        evaluate_into(run, 400, [task], Scorer(lm, ByteTokenizer()), None, {})
    of_run = newest_results(runs[0])["fda"].metrics
    of_seeds = {tag: each["equal"].value for tag, each in Findings.read(runs).capabilities.items()}
    for found in (of_run, of_seeds):
        assert (found["fda/gain"].low, found["fda/gain"].high) == (0, 0)
        assert found["fda/contains"].high == pytest.approx(0.2775, abs=1e-3), "0 of 10"


def test_a_metric_is_at_chance_where_its_interval_holds_chance():
    assert Value(0.3, 0.2, 0.4, 10, 0.25).at_chance
    assert not Value(0.3, 0.26, 0.4, 10, 0.25).at_chance
    assert not Value(0.3, 0.2, 0.4, 10).at_chance
    assert values(Scores({"a": 0.5})) == {"a": Value(0.5)}


def test_a_group_leaves_out_tasks_without_rows_and_names_them(tmp_path):
    with pytest.raises(UserError, match="there are no rows of"):
        with_rows("retrieval", Asked(rows=str(tmp_path)))
    (tmp_path / "fda.jsonl").write_text("")
    with pytest.warns(SeqarchWarning, match="left out without rows: swde, swde_v0, squad, squad_v0"):
        assert {task.name for task in with_rows("retrieval", Asked(rows=str(tmp_path)))} == {"fda", "fda_v0"}
    with pytest.raises(UserError, match="there are no rows of swde"):
        with_rows(["retrieval", "swde"], Asked(rows=str(tmp_path)))


def test_a_group_leaves_out_tasks_that_do_not_suit_the_run(trained, tmp_path):
    """Sequences of 48 tokens are too short for `RepeatGain`, and no document has 102,400 tokens."""
    short, long = r"left out RepeatGain: data\.sequence_length .* 768, not 48", "left out LongDocuments: no document"
    with pytest.warns(SeqarchWarning, match=short), pytest.warns(SeqarchWarning, match=long):
        evaluate_checkpoint(trained, ["recall", "long", "loss"], tmp_path)
    assert newest_results(tmp_path).keys() == {"BitsPerByte", "Copying", "LossByDomain", "LossByPosition"}
    for words in (["recall", "long"], ["RepeatGain", "loss"]):
        with pytest.raises(UserError, match=r"768, not 48|no document of docs"):
            evaluate_checkpoint(trained, words, tmp_path)


def test_words_name_tasks():
    assert (
        [task.name for task in tasks_named("Copying")]
        == [task.name for task in tasks_named(["Copying"])]
        == ["Copying"]
    )
    assert {task.name for task in tasks_named(["loss", "Copying"])} == {
        "BitsPerByte",
        "Copying",
        "LossByDomain",
        "LossByPosition",
    }
    with pytest.raises(UserError, match=r"unknown task 'Copyng': did you mean Copying\? \(--list shows every task\)"):
        tasks_named(["Copyng"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "Copying"], "missing --checkpoint"),
        (["--checkpoint", "none.ckpt", "--tasks", "Copying"], "there is no checkpoint 'none.ckpt'"),
        (["--checkpoint", "RUN"], "no task is named"),
        (["--checkpoint", "RUN", "--tasks", "Copyng"], "unknown task"),
        (["--checkpoint", "RUN", "--tasks", "Copying", "--limit", "0"], "--limit must be at least 1, not 0"),
        (["--checkpoint", "RUN", "--tasks", "Copying", "--lengths", "-5"], "--lengths must lie in 1..1073741824, not"),
        (["--checkpoint", "RUN", "--tasks", "Copying", "--rows", "nowhere"], "there is no folder 'nowhere'"),
        (["--checkpoint", "RUN", "--tasks", "Copying", "--prefix", "bos"], "prefix is bos: expected eos or none"),
        (["--checkpoint", "RUN", "--tasks", "Copying", "--precision", "8"], "Precision '8' is invalid"),
    ],
)
def test_wrong_input_is_one_sentence_and_leaves_nothing_behind(arguments, message, trained, tmp_path):
    with pytest.raises(UserError, match=message):
        cli.run(["eval", *(str(trained) if word == "RUN" else word for word in arguments), "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_the_command_prints_and_writes(trained, tmp_path, capsys):
    cli.run(["eval", "--checkpoint", str(trained), "--tasks", "loss", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "loss/ood/code" in printed
    assert newest_results(tmp_path).keys() == {"BitsPerByte", "Copying", "LossByDomain", "LossByPosition"}
    cli.run(["eval", "--list"])
    assert "LossByPosition" in capsys.readouterr().out


def test_a_place_without_a_folder_is_refused_before_anything_is_scored(trained, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("seqarch.evaluation.results.evaluate", lambda *_: pytest.fail("scored"))
    with pytest.raises(NotADirectoryError):
        evaluate_checkpoint(trained, [Coin(2, 1)], tmp_path / "file")


def test_text_of_the_training_is_no_evaluation(trained, shards, tmp_path):
    (tmp_path / "fda.jsonl").write_bytes((shards / "docs.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"fda: fda\.jsonl is docs\.jsonl of docs, which the model was trained on"):
        evaluate_checkpoint(trained, [Coin(1), Cloze("fda", folder=str(tmp_path))], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_results_on_other_held_out_text_are_not_paired(shards, tmp_path):
    text = (shards / "code.jsonl").read_bytes()
    (tmp_path / "docs.jsonl").write_bytes(text)
    prepare([tmp_path / "docs.jsonl"], tmp_path, "docs", "byte", holdout=1, workers=1)
    prepare([tmp_path / "docs.jsonl"], tmp_path, "train", "byte", holdout=0.3, workers=1)
    tasks = [RepeatGain(2, 8, [8]), LongDocuments([16, 32], 2)]
    scorer, runs = Scorer(small_lm(vocab=257), ByteTokenizer()), {}
    for name, root, train, ood, length in (
        ("base", shards, "docs", "code", 48),
        ("same", shards, "docs", "code", 48),
        ("longer", shards, "docs", "code", 96),
        ("swapped", shards, "code", "docs", 48),
        ("other", tmp_path, "train", "docs", 48),
    ):
        data = TextDataModule(str(root), {train: 1.0}, [ood], sequence_length=length, eval_tokens=192)
        runs[name] = write_run(tmp_path / "runs" / name, name)
        evaluate_into(runs[name], 400, tasks, scorer, data, {})
    found = Findings.read([*runs.values()]).capabilities
    assert len(found["loss_by_position/docs/0-16"]) == 5
    assert paired(found["repeat_gain/8"]) == {"same"}
    assert paired(found["loss_by_position/docs/0-16"]) == {"same", "longer", "swapped"}


def paired(measured):
    """The models that are compared with the reference."""
    return {name for name, one in measured.items() if one.difference is not None}


def test_rows_are_read_before_anything_is_scored(trained, tmp_path):
    (tmp_path / "fda.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match=r"fda\.jsonl: row 1 has no key, value"):
        evaluate_checkpoint(trained, [Coin(1), Cloze("fda", folder=str(tmp_path))], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prompts_longer_than_the_learned_positions_are_refused():
    torch.manual_seed(0)
    mixers: dict[str, MixerFactory] = {"attention": lambda d, i, n: Attention(d, i, n, n_heads=2)}
    scorer = Scorer(SequenceLM(257, 16, 1, mixers, learned_positions=8), ByteTokenizer())
    with pytest.raises(UserError, match="learned_positions is 8: a sequence of 11"):
        scorer.log_likelihood([(b"abc", b"d"), (b"0123456789", b"a")])


def test_lm_eval_builds_a_checkpoint_by_its_entry_point(trained):
    """As `lm_eval --model seqarch --model_args checkpoint=RUN` does if lm_eval reads entry points."""
    instance = pytest.importorskip("lm_eval.api.instance")
    (entry,) = entry_points(group="lm_eval.models", name="seqarch")
    given = {"batch_size": 1, "max_batch_size": None, "device": "cpu"}
    model = entry.load().create_from_arg_string(f"checkpoint={trained}", given)
    ask = instance.Instance("loglikelihood", {}, ("Answer:", " yes"), 0)
    scorer = open_checkpoint(trained).scorer
    wanted = scorer.log_likelihood([scorer.encode_pair("Answer:", " yes")])[0, 0]
    assert model.loglikelihood([ask], disable_tqdm=True) == [(pytest.approx(float(wanted)), False)]


def test_a_checkpoint_outside_a_run_needs_a_folder_and_knows_its_precision(trained, tmp_path):
    checkpoint = tmp_path / "model.ckpt"
    checkpoint.write_bytes((trained / "checkpoints/step_00000004.ckpt").read_bytes())
    with pytest.raises(UserError, match="is not in a run folder: set --out"):
        evaluate_checkpoint(checkpoint, [Coin(1)])
    (result,) = evaluate_checkpoint(checkpoint, [Coin(1)], tmp_path / "out")
    assert result.content["precision"] == "32-true"
    with pytest.raises(UserError, match="LossByDomain reads the data of the run"):
        evaluate_checkpoint(checkpoint, [Coin(2), LossByDomain()], tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert torch.is_grad_enabled()


def test_weights_are_cast_where_the_precision_asks_for_it(trained):
    for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)):
        scorer = open_checkpoint(trained, precision).scorer
        assert {parameter.dtype for parameter in scorer.lm.parameters()} == {dtype}
        assert scorer.losses(torch.arange(20)[None]).isfinite().all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train": []}, "data.train is []: expected a mapping"),
        (3, "data is 3: expected a mapping of its options"),
        ({"root": []}, "data.root is empty"),
        ({"root": "embedded", "rot": 1}, "data has no option 'rot': did you mean root?"),
        ({}, "is in no run with data"),
    ],
)
def test_a_configuration_whose_data_cannot_be_read(trained, options, said):
    opened = open_checkpoint(trained)._replace(config={"data": options})
    with pytest.raises(UserError, match=re.escape(said)):
        _data(opened, None)


def test_a_refusal_comes_without_a_bar(trained, capsys):
    with pytest.raises(UserError, match="passkey_9 is too short"):
        evaluate_checkpoint(trained, Passkey(9), verbose=True)
    assert capsys.readouterr().err.strip() == ""

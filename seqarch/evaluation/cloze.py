"""Retrieval from the prompt: SWDE, SQuAD and FDA as Based made them (arXiv 2402.18668, section 5)."""

import re
from typing import Literal

import numpy as np

from seqarch.arguments import Count
from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError, check_known
from seqarch.evaluation.rows import RowFiles, find_file, hub_command, read_rows
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Asked, Scores, Task

TASKS = {"swde": "hazyresearch/based-swde-v2", "squad": "hazyresearch/based-squad", "fda": "hazyresearch/based-fda"}
"""The data sets on the hub, whose rows have the fields `FIELDS`."""
FIELDS = ("text", "key", "value")
MAX_NEW, STOP = 48, ("\n",)


class Cloze(Task):
    """Whether a model continues a text with a value that the text holds.

    Metrics: `<task>/contains`, the share of the greedy continuations, of at most 48 tokens and up to a new line, that
    contain the value in any case (lm-eval's metric). Small models are at 0 there, so there are two continuous metrics.
    `<task>/log_likelihood` is the log-probability of the value in nats. `<task>/gain` is this minus the log-probability
    of the value after only the last line of the text, which is the question.

    Args:
        task: swde, squad or fda; the rows are `<task>.jsonl` in `folder`, with the fields text, key and value.
        prompt: v1 strips text and value as lm-eval does since June 2026, v0 does not, as in the publications; jrt reads
            the text twice (arXiv 2407.05483).
        limit: take the first rows only.
        folder: with the rows.
    """

    group = "retrieval"
    reads_data = False
    version = 3
    decodes = True

    def __init__(
        self,
        task: str,
        prompt: Literal["v0", "v1", "jrt"] = "v1",
        limit: Count | None = None,
        folder: str | None = None,
    ) -> None:
        check_known("retrieval task", task, TASKS)
        self.task, self.prompt, self.limit, self.folder = task, prompt, limit, folder

    @classmethod
    def variants(cls, asked: Asked) -> list[Task]:
        return [cls(task, prompt, asked.limit, asked.rows) for task in TASKS for prompt in ("v1", "v0")]

    @property
    def name(self) -> str:
        return self.task if self.prompt == "v1" else f"{self.task}_{self.prompt}"

    def row_files(self) -> RowFiles:
        path = find_file(self.folder, self.task)
        if path is None:
            how = hub_command(self.task, TASKS[self.task], None, "validation")
            raise UserError(f"there are no rows of {self.task}: {how} and set --rows ROWS")
        return RowFiles(str(self.folder), {path.name: path})

    def prepare(self, data: TextDataModule | None) -> None:
        (path,) = self.row_files().files.values()
        self.asked = [self._asked(row["text"], row["value"]) for row in read_rows(path, *FIELDS)[: self.limit]]

    def _asked(self, text: str, value: str) -> tuple[str, str]:
        """The prompt and the value that should follow."""
        if self.prompt == "v0":
            return text, value
        text, value = text.strip(), value.strip()
        return (f"{text}\n{text}" if self.prompt == "jrt" else text), value

    def score(self, scorer: Scorer) -> Scores:
        texts, values = zip(*self.asked, strict=True)
        pairs = [scorer.encode_pair(text, f" {value.strip()}") for text, value in self.asked]
        questions = [scorer.encode_pair(question(text), f" {value.strip()}") for text, value in self.asked]
        known, guessed = scorer.log_likelihood(pairs + questions, cut=True)[:, 0].reshape(2, -1).numpy()
        prompts = [scorer.encode(text) for text in texts]
        written = scorer.generate(prompts, MAX_NEW, STOP, cut=True)
        right = [contains(each, value) for each, value in zip(written, values, strict=True)]
        samples = {
            f"{self.name}/contains": np.array(right),
            f"{self.name}/log_likelihood": known.astype(np.float32),
            f"{self.name}/gain": (known - guessed).astype(np.float32),
        }
        cut = sum(
            scorer.excess(prompt, MAX_NEW) > 0 or scorer.excess(context, len(value) - 1) > 0
            for prompt, (context, value) in zip(prompts, pairs, strict=True)
        )
        return Scores.of(samples, {f"{self.name}/contains": 0.0, f"{self.name}/gain": 0.0}, cut)


def contains(text: str, value: str) -> bool:
    """Whether a text contains a value in any case."""
    return re.search(re.escape(value), text, re.IGNORECASE) is not None


def question(text: str) -> str:
    """The last line of a prompt, such as "Device name:", with the spaces that follow it in the prompt."""
    return text[text.rstrip().rfind("\n") + 1 :]

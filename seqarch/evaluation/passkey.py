"""Passkey retrieval: the single needles in a haystack of RULER (arXiv 2404.06654, appendix B)."""

import functools
import itertools
import re
import uuid
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from seqarch.arguments import Count
from seqarch.errors import UserError
from seqarch.evaluation.cloze import contains
from seqarch.evaluation.rows import RowFiles, find_file, read_rows
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Asked, Scores, Task

Haystack = Literal["lines", "essays", "uuids"]
"""Where a value is hidden: a number among equal lines or in essays, or a UUID in essays."""
ESSAYS = "essays"
"""Name of the file with rows."""
LENGTHS = (8192, 16384, 32768, 65536, 102400)
"""Lengths of the published evaluation (arXiv 2505.18522, table 3)."""
MAX_NEW = 128
HEAD = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
QUESTION = (
    "What is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)
ADJECTIVES = (
    "amber brave calm daring eager faint gentle hollow icy jolly keen lively mellow narrow old pale quick rapid silent "
    "tidy urban vivid wooden young zesty bitter clever dusty early fierce golden humble"
)
NOUNS = (
    "anchor basket candle desert engine forest garden harbor island jacket kettle ladder meadow needle orchard pencil "
    "quarry river saddle temple umbrella valley window yard zipper bridge castle dragon feather guitar hammer lantern"
)


class Passkey(Task):
    """Whether a model finds a number of seven digits, or a UUID, in a long text.

    Metrics: `<name>/contains`, the share of greedy continuations of 128 tokens that contain the value, and
    `<name>/log_likelihood` of the value in nats. The array `depth` holds the place of the value: 0 is the beginning of
    the text, 1 its end. Prompts have the words of lm-eval's `niah_single_1` ("lines"), `niah_single_2` ("essays") and
    `niah_single_3` ("uuids"), with the keys of this file, and as many lines or sentences as fit. Sentences come from
    the beginning of the essays, and again when all are used. Each prompt is drawn from (length, index, haystack) and
    does not depend on the others.

    Args:
        length: tokens of a prompt, with the prefix and the 128 that are generated.
        samples: number of prompts.
        haystack: where the value is hidden.
        folder: with `essays.jsonl`, rows with the field text; only for essays.

    Raises:
        UserError: an option below 1, no essays, a length below the text without lines or sentences, or above a model's
            learned positions.
    """

    group = "passkey"
    reads_data = False
    version = 1
    decodes = True

    def __init__(
        self, length: Count = LENGTHS[0], samples: Count = 100, haystack: Haystack = "lines", folder: str | None = None
    ) -> None:
        self.length, self.samples, self.haystack, self.folder = length, samples, haystack, folder
        self.kind = "uuid" if haystack == "uuids" else "number"
        self.file = None if haystack == "lines" else find_file(folder, ESSAYS)
        if haystack != "lines" and self.file is None:
            raise UserError(f"{self.name} needs essays: write them to ROWS/{ESSAYS}.jsonl, rows with the field text")
        self._known: dict[tuple[str, str], list[int]] = {}

    @classmethod
    def variants(cls, asked: Asked) -> list[Task]:
        known: Sequence[Haystack] = get_args(Haystack) if find_file(asked.rows, ESSAYS) else ("lines",)
        sizes = [(length, asked.limit or 100) for length in asked.lengths or LENGTHS]
        return [cls(*size, each, asked.rows) for each in known for size in sizes]

    @property
    def name(self) -> str:
        return f"passkey_{'' if self.haystack == 'lines' else f'{self.haystack}_'}{self.length}"

    @property
    def settings(self) -> dict[str, Any]:
        return {"length": self.length, "samples": self.samples}  # the name says the rest

    def row_files(self) -> RowFiles | None:
        return RowFiles(str(self.folder), {self.file.name: self.file}) if self.file else None

    def check(self, scorer: Scorer) -> None:
        super().check(scorer)
        self.draw(scorer, 0)

    def draw(self, scorer: Scorer, index: int) -> tuple[list[int], str, float]:
        """The tokens of a prompt, the value to find and its depth."""
        random = np.random.default_rng([self.length, index, *filter(None, [get_args(Haystack).index(self.haystack)])])
        key = "-".join(random.choice(words.split()) for words in (ADJECTIVES, NOUNS))
        number = random.integers(10**6, 10**7)
        value = str(uuid.UUID(bytes=random.bytes(16), version=4) if self.kind == "uuid" else number)
        words = {"kind": self.kind, "key": key, "value": value}
        head, needle, question = (each.format(**words) for each in (HEAD, NEEDLE, QUESTION))
        start = scorer.encode(head)
        ending = after(scorer, ".", f"\n{question}") if self.file else after(scorer, "\n", question)
        room = self.length - MAX_NEW - sum(map(len, (scorer.prompt(start), self._piece(scorer, needle), ending)))
        # Alone after a new line, the first sentence may have more tokens than after another one.
        room -= max(0, len(after(scorer, "\n", self._texts[0])) - len(self._piece(scorer, self._texts[0])))
        fill = self._filler(scorer, room)
        before = int(random.integers(len(fill)))
        texts = [*fill[:before], needle, *fill[before:]]
        pieces = [self._piece(scorer, text) for text in texts]
        if self.file:
            pieces[0] = after(scorer, "\n", texts[0])
        return [*start, *itertools.chain(*pieces), *ending], value, before / len(fill)

    def _filler(self, scorer: Scorer, room: int) -> list[str]:
        """The lines or sentences whose tokens fit into `room`."""
        found: list[str] = []
        for text in itertools.cycle(self._texts):
            room -= len(self._piece(scorer, text))
            if room < 0:
                break
            found.append(text)
        if not found:
            raise UserError(f"{self.name} is too short for a prompt of {self.length - room} tokens: raise --lengths")
        return found

    @functools.cached_property
    def _texts(self) -> list[str]:
        """One line, or the sentences of the essays."""
        if self.file is None:
            return [LINE]
        words = [word for row in read_rows(self.file, "text") for word in row["text"].split()]
        return re.split(r"(?<=[.!?]) ", " ".join(words))

    def _piece(self, scorer: Scorer, text: str) -> list[int]:
        """The tokens of a line or a sentence after another one. They are remembered."""
        key = scorer.text.name, text
        if key not in self._known:
            self._known[key] = after(scorer, ".", f" {text}") if self.file else after(scorer, "\n", f"{text}\n")
        return self._known[key]

    def score(self, scorer: Scorer) -> Scores:
        prompts, values, depths = zip(*(self.draw(scorer, index) for index in range(self.samples)), strict=True)
        answers = [scorer.encode_pair("is", f" {value}")[1] for value in values]
        likelihoods = scorer.log_likelihood(list(zip(prompts, answers, strict=True)))[:, 0].numpy()
        written = scorer.generate(prompts, MAX_NEW)
        right = [contains(text, value) for text, value in zip(written, values, strict=True)]
        found = {"contains": np.array(right), "log_likelihood": likelihoods.astype(np.float32)}
        samples = {f"{self.name}/{metric}": each for metric, each in found.items()}
        scores = Scores.of(samples, {f"{self.name}/contains": 0.0})
        scores.samples["depth"] = np.array(depths, np.float32)
        return scores


def after(scorer: Scorer, before: str, text: str) -> list[int]:
    """The tokens of a text that follows another."""
    return scorer.encode(before + text)[len(scorer.encode(before)) :]

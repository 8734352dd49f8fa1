"""Passkey retrieval: the first needle in a haystack of RULER (arXiv 2404.06654, appendix B)."""

import numpy as np

from seqarch.errors import UserError, check_counts
from seqarch.evaluation.cloze import contains
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Asked, Scores, Task

LENGTHS = (8192, 16384, 32768, 65536, 102400)
"""Lengths of the published evaluation (arXiv 2505.18522, table 3)."""
MAX_NEW = 128
HEAD = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
NEEDLE = "One of the special magic numbers for {key} is: {value}.\n"
QUESTION = (
    "What is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
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
    """Whether a model finds a number of seven digits in a long text that repeats one line.

    Metrics: `passkey_<length>/contains`, the share of greedy continuations of 128 tokens that contain the number, and
    `passkey_<length>/log_likelihood` of the number in nats. The array `depth` holds the place of the number: 0 is the
    beginning of the text, 1 its end. Prompts have the words of lm-eval's `niah_single_1`, with the keys of this file,
    and as many lines as fit, as in RULER. Each is drawn from (length, index) and does not depend on the others.

    Args:
        length: tokens of a prompt, with the prefix and the 128 that are generated.
        samples: number of prompts.

    Raises:
        UserError: an option below 1, a length below the text without lines, or above a model's learned positions.
    """

    group = "passkey"
    reads_data = False
    version = 1
    decodes = True

    def __init__(self, length: int = LENGTHS[0], samples: int = 100) -> None:
        check_counts(**{"Passkey.length": length, "Passkey.samples": samples})
        self.length, self.samples = length, samples

    @classmethod
    def variants(cls, asked: Asked) -> list[Task]:
        return [cls(length, asked.limit or 100) for length in asked.lengths or LENGTHS]

    @property
    def name(self) -> str:
        return f"passkey_{self.length}"

    def check(self, scorer: Scorer) -> None:
        super().check(scorer)
        self.draw(scorer, 0)

    def draw(self, scorer: Scorer, index: int) -> tuple[list[int], str, float]:
        """The tokens of a prompt, the number to find and its depth."""
        random = np.random.default_rng([self.length, index])
        key = "-".join(random.choice(words.split()) for words in (ADJECTIVES, NOUNS))
        value = str(random.integers(10**6, 10**7))
        head, line = scorer.encode(HEAD), after_newline(scorer, LINE)
        needle, asked = (after_newline(scorer, part.format(key=key, value=value)) for part in (NEEDLE, QUESTION))
        fixed = len(scorer.prompt(head)) + len(needle) + len(asked) + MAX_NEW
        lines = (self.length - fixed) // len(line)
        if lines < 1:
            least = fixed + len(line)
            raise UserError(f"{self.name} is too short: a prompt has at least {least} tokens, set longer --lengths")
        before = int(random.integers(lines))
        tokens = [*head, *line * before, *needle, *line * (lines - before), *asked]
        return tokens, value, before / lines

    def score(self, scorer: Scorer) -> Scores:
        prompts, values, depths = zip(*(self.draw(scorer, index) for index in range(self.samples)), strict=True)
        answers = [scorer.encode_pair("is", f" {value}")[1] for value in values]
        likelihoods = scorer.log_likelihood(list(zip(prompts, answers, strict=True)))[:, 0].numpy()
        written = scorer.generate(prompts, MAX_NEW)
        right = [contains(text, value) for text, value in zip(written, values, strict=True)]
        found = {"contains": np.array(right, np.float32), "log_likelihood": likelihoods.astype(np.float32)}
        samples = {f"{self.name}/{metric}": each for metric, each in found.items()}
        scores = Scores.of(samples, {f"{self.name}/contains": 0.0})
        scores.samples["depth"] = np.array(depths, np.float32)
        return scores


def after_newline(scorer: Scorer, text: str) -> list[int]:
    """The tokens of a text that follows a new line."""
    return scorer.encode(f"\n{text}")[len(scorer.encode("\n")) :]

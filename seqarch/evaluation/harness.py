"""Few-shot tasks through lm-evaluation-harness: its prompts and metrics, our model, rows from a folder or a package."""

import functools
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval.tasks
import numpy as np
from datasets import Dataset
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from seqarch.errors import UserError, several
from seqarch.evaluation.scorer import Scorer

STOCK = Path(lm_eval.tasks.__file__).parent


class SeqarchLM(TemplateLM):
    """A model as lm-evaluation-harness sees it: `lm_eval.simple_evaluate(model=SeqarchLM(scorer), tasks=...)`.

    Prompts longer than `scorer.length` are cut on the left, as lm-eval cuts them for models of limited length.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.text = scorer.text
        self.cut: set[tuple[str, str]] = set()
        """Contexts and continuations, of requests whose context was cut."""
        self._encoded = functools.lru_cache(maxsize=64)(self.text.encode)  # the answers of a question share a context

    @property
    def eot_token_id(self) -> int:
        return self.text.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        return self._encoded(string)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **options: Any) -> list[tuple[float, bool]]:
        # lm-eval turns an empty context into the EOS token, which the scorer puts before every context
        pairs = [(context if text[0] else [], continuation) for text, context, continuation in requests]
        excess = [self.scorer.excess(context, len(continuation) - 1) for context, continuation in pairs]
        self.cut |= {text for (text, *_), tokens in zip(requests, excess, strict=True) if tokens}
        return [(total, bool(best)) for total, best in self.scorer.log_likelihood(pairs, cut=True).tolist()]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0]) for request in requests]
        windows = [self._windows(ids) for ids in texts]
        found = self.scorer.log_likelihood([*itertools.chain(*windows)], cut=True)[:, 0]
        return [float(each.sum()) for each in found.split([len(each) for each in windows])]

    def _windows(self, ids: list[int]) -> list[tuple[list[int], list[int]]]:
        """Contexts and continuations that cover a text, each with as much context as `scorer.length` allows."""
        windows = get_rolling_token_windows(ids, self.eot_token_id, self.scorer.length or max(1, len(ids)), 1)
        pairs = enumerate(map(make_disjoint_window, windows))
        return [(context if number else [], continuation) for number, (context, continuation) in pairs]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        alike: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for index, request in enumerate(requests):
            options = request.args[1]
            if options.get("do_sample") or options.get("temperature"):
                raise UserError("this task draws its answers, which seqarch does not: choose one with greedy answers")
            stop = tuple(several(options.get("until") or ()))
            alike.setdefault((options.get("max_gen_toks", 256), stop), []).append(index)
        texts = [""] * len(requests)
        for (max_new, stop), indices in alike.items():
            prompts = [self.tok_encode(requests[index].args[0]) for index in indices]
            for index, text in zip(indices, self.scorer.generate(prompts, max_new, stop, cut=True), strict=True):
                texts[index] = text
        return texts


def stock_config(name: str) -> dict[str, Any]:
    """The stock settings of a task, from its YAML file below `lm_eval/tasks`."""
    return {**load_yaml(STOCK / f"{name}.yaml"), "num_fewshot": 0}


class RowsTask(ConfigurableTask):
    """A stock task with rows that are given, not downloaded.

    Args:
        config: from `stock_config`.
        rows: rows in the form of the stock data set, by split.
    """

    def __init__(self, config: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> None:
        self.given = rows
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # else it warns of its own stock settings
        super().__init__(config=config)

    def check(self) -> None:
        """Raise an error for a row that gives no prompt, or whose answer is not among its choices."""
        for row in self.eval_docs:
            choices, text, answer = self.doc_to_choice(row), self.doc_to_text(row), self.doc_to_target(row)  # pyright: ignore
            answer = text if self.multiple_input else answer
            if not all(isinstance(each, str) for each in choices):
                raise TypeError(f"a choice is not text: {row}")
            if not (answer in choices if isinstance(answer, str) else answer in range(len(choices))):
                raise ValueError(f"the answer {answer!r} is not among the {len(choices)} choices of {row}")

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        self.dataset = {split: Dataset.from_list(rows) for split, rows in self.given.items()}


def _no_bar(items: Any, **options: Any) -> Any:
    """What stands for lm-eval's progress bars, because seqarch shows one."""
    return items


def score_choices(
    scorer: Scorer, tasks: dict[str, ConfigurableTask], limit: int | None
) -> tuple[dict[str, np.ndarray], float, int]:
    """Score multiple-choice tasks.

    Returns:
        lm-eval's metrics of each sample, `[n]` bool, by name, task by task; the share of a guess; and the number of
        samples that have a cut prompt.
    """
    with mock.patch("lm_eval.api.task.tqdm", _no_bar), mock.patch("lm_eval.api.model.tqdm", _no_bar):
        every: Any = tasks
        lm = SeqarchLM(scorer)
        found: Any = evaluate(lm, every, limit=limit, bootstrap_iters=0, log_samples=True)
    samples = [sample for name in tasks for sample in found["samples"][name]]
    metrics = {name: np.array([sample[name] for sample in samples], bool) for name in samples[0]["metrics"]}
    cut = sum(any(tuple(each) in lm.cut for each in sample["arguments"]) for sample in samples)
    return metrics, float(np.mean([1 / len(sample["arguments"]) for sample in samples])), cut

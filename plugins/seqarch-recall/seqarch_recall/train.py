"""Training the models of one point, a mixer at a width, side by side at several learning rates."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.errors import UserError, one_line
from seqarch.mixers.base import Losses
from seqarch.runs.files import atomic
from seqarch.training.checkpoint import check_optimizer, read_tensors
from seqarch.training.integrity import seal
from seqarch_recall.examples import IGNORED, Examples, questions
from seqarch_recall.model import RecallLM
from seqarch_recall.settings import Settings

EAGER = 2
"""Steps of a shape before its graph is captured: kernels are compiled and tuned in them."""
LOGITS = 2**28
"""Logits that a batch of the test has at most."""


class Batch(NamedTuple):
    """Tokens `[B, T]`, and places and answers of their questions `[B, Q]`."""

    inputs: Tensor
    places: Tensor
    answers: Tensor


class Scores(NamedTuple):
    """Results of a test: mean accuracy, accuracy of each group by its name, and other measures."""

    accuracy: float
    slices: dict[str, float]
    measures: dict[str, float]


class Learner:
    """One model at one learning rate; on a GPU its steps run on a stream of their own, with `graphs` as CUDA graphs."""

    def __init__(self, model: RecallLM, rate: float, weight_decay: float, graphs: bool = True) -> None:
        self.model = model
        self.rate = rate
        self.device = device = next(model.parameters()).device
        gpu = device.type == "cuda"
        options: dict[str, Any] = {"lr": torch.tensor(rate, device=device), "weight_decay": weight_decay}
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=gpu, **options)
        self.stream = torch.cuda.Stream(device) if gpu else None
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Batch]] = {}
        self.seen: Counter[Any] = Counter()
        self.captures = graphs
        self.pool = torch.cuda.graph_pool_handle() if gpu else None

    def set_share(self, share: float) -> None:
        """Set the learning rate to a share of its highest value."""
        self.optimizer.param_groups[0]["lr"].fill_(self.rate * share)

    def step(self, batch: Batch) -> None:
        """One step of AdamW."""
        if self.stream is None:
            self._compute(batch)
            return
        with torch.cuda.stream(self.stream):
            shape = (batch.inputs.shape, batch.places.shape)
            if shape not in self.graphs and self.seen[shape] >= EAGER and self.captures:
                self._capture(shape, batch)
            if shape in self.graphs:
                graph, static = self.graphs[shape]
                for mine, given in zip(static, batch, strict=True):
                    mine.copy_(given)
                graph.replay()
            else:
                self._compute(batch)
                self.seen[shape] += 1

    def _compute(self, batch: Batch) -> None:
        losses: Losses = {}
        self.optimizer.zero_grad()
        with precision(self.device):
            logits = self.model.answers(batch.inputs, batch.places, losses)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.answers.flatten(), ignore_index=IGNORED)
        sum(losses.values(), loss).backward()
        self.optimizer.step()

    def _capture(self, shape: Any, batch: Batch) -> None:
        """Record the step of a shape as a graph."""
        static = Batch(*(part.clone() for part in batch))
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                self._compute(static)
        except RuntimeError as error:  # the process is of no more use: its random generator stays in the capture
            why = one_line(error)[:200]
            raise UserError(f"this mixer's step cannot be a CUDA graph ({why}): set --graphs false") from error
        self.graphs[shape] = graph, static


def precision(device: torch.device) -> torch.autocast:
    """Mixed precision in bf16 on GPUs; float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def batches(segments: Sequence[Examples], size: int, device: torch.device) -> Iterator[Batch]:
    """Full batches of each segment in order, as in the sources."""
    for segment in segments:
        parts = [torch.as_tensor(part, device=device) for part in (segment.inputs, *questions(segment))]
        for start in range(0, len(parts[0]) - size + 1, size):
            yield Batch(*(part[start : start + size] for part in parts))


@torch.no_grad()
def test(model: RecallLM, segments: Sequence[Examples], *, exact: bool) -> Scores:
    """The accuracy of a model, a mean over examples.

    An example's accuracy is the share of its answers that are right; with `exact`, 1 if all are. Where answers are
    distributions, an answer is right if the automaton allows it, and all answers count alike. `tvd`, half the L1
    distance to the true distribution, is then measured too.
    """
    device = next(model.parameters()).device
    model.eval()
    rows: list[Tensor] = []
    for segment in segments:
        asked = questions(segment)
        size = min(256, max(1, LOGITS // (asked.places.shape[1] * model.vocab_size)))
        for start in range(0, len(segment.inputs), size):
            part = slice(start, start + size)
            arrays = (segment.inputs, *asked, *(() if segment.truth is None else (segment.truth,)))
            tokens, places, answers, *truth = (torch.as_tensor(each[part], device=device) for each in arrays)
            with precision(device):
                logits = model.answers(tokens, places)
            rows.append(_rows(logits, places, answers, truth[0] if truth else None, exact=exact))
    model.train()
    weight, right, far = torch.cat(rows, 1).double().cpu()
    groups = torch.as_tensor(np.concatenate([segment.groups for segment in segments]))

    def mean(values: Tensor, chosen: Tensor | slice = slice(None)) -> float:
        return float(values[chosen].sum() / weight[chosen].sum())

    slices = {str(int(group)): mean(right, groups == group) for group in groups.unique()}
    return Scores(mean(right), slices, {} if segments[0].truth is None else {"tvd": mean(far)})


def _rows(logits: Tensor, places: Tensor, answers: Tensor, truth: Tensor | None, *, exact: bool) -> Tensor:
    """`[3, B]`: the weight of each example, and with this weight its accuracy and its distance to the truth."""
    asked = answers != IGNORED
    count = asked.sum(1)
    guess = logits.argmax(-1)
    if truth is None:
        right = (guess == answers) | ~asked
        share = right.all(1).float() if exact else (right & asked).sum(1) / count
        return torch.stack([torch.ones_like(share), share, torch.zeros_like(share)])
    truth = truth.gather(1, places[..., None].expand(-1, -1, truth.shape[-1]))
    truth = F.pad(truth, (0, logits.shape[-1] - truth.shape[-1]))
    right = (truth.gather(-1, guess[..., None])[..., 0] > 0) & asked
    far = (logits.float().softmax(-1) - truth).abs().sum(-1) / 2 * asked
    return torch.stack([count.float(), right.sum(1).float(), far.sum(1)])


class Progress(NamedTuple):
    """The state of training: epochs done, the best learner's rate and scores at its best epoch, and seconds."""

    epochs: int
    rate: float
    scores: Scores
    seconds: float
    finished: bool


def share_of_rate(settings: Settings, epoch: int) -> float:
    """The learning rate of an epoch over the highest: a linear rise, if any, then a cosine to zero."""
    rise = round(settings.warmup * settings.epochs)
    if epoch < rise:
        return (epoch + 1) / rise
    return (1 + math.cos(math.pi * (epoch - rise) / (settings.epochs - rise))) / 2


def train(
    settings: Settings,
    learners: Sequence[Learner],
    testing: Sequence[Examples],
    checkpoint: Path,
    report: Callable[[Progress], None],
) -> Progress:
    """Train until one learner reaches the accuracy at which to stop, or to the last epoch.

    All learners see the same batches. The `checkpoint` is written after each epoch. From it the same call goes on where
    it was stopped, on a CPU with the same numbers. `report` is called after each test, and then the checkpoint
    is written. A call that was stopped in between makes that epoch again, so no test goes without its report.
    """
    progress = _load(checkpoint, learners)
    start = time.monotonic() - progress.seconds
    with ThreadPoolExecutor(1) as background:
        coming = background.submit(settings.training, progress.epochs)
        segments: list[Batch] = []
        while not progress.finished:
            if settings.fresh or not segments:
                segments = list(batches(coming.result(), settings.batch, learners[0].device))
            if settings.fresh:
                coming = background.submit(settings.training, progress.epochs + 1)
            _epoch(learners, segments, share_of_rate(settings, progress.epochs))
            epochs = progress.epochs + 1
            tested = epochs % settings.test_every == 0 or epochs == settings.epochs
            rate, scores = progress.rate, progress.scores
            for learner in learners if tested else ():
                found = test(learner.model, testing, exact=settings.exact)
                if not rate or found.accuracy > scores.accuracy:  # the first counts, even if it is never right
                    rate, scores = learner.rate, found
            done = epochs == settings.epochs or scores.accuracy >= settings.stop
            progress = Progress(epochs, rate, scores, time.monotonic() - start, done)
            if tested:
                report(progress)
            _save(checkpoint, learners, progress)
        coming.cancel()
    return progress


def _epoch(learners: Sequence[Learner], segments: Sequence[Batch], share: float) -> None:
    """One pass over the batches, all learners side by side, at a share of their highest rates."""
    for learner in learners:
        learner.set_share(share)
    wait = torch.cuda.synchronize if learners[0].stream is not None else lambda: None
    wait()  # until each stream has finished its work
    for batch in segments:
        for learner in learners:
            learner.step(batch)
    wait()


def _save(path: Path, learners: Sequence[Learner], progress: Progress) -> None:
    state: dict[str, Any] = {
        "progress": [*progress[:2], list(progress.scores), *progress[3:]],
        "random": torch.get_rng_state(),
        "learners": [(each.model.state_dict(), each.optimizer.state_dict()) for each in learners],
    }
    with atomic(path, durable=True) as partial:
        with partial.open("wb") as file:  # given a path, PyTorch reports a full disk as a RuntimeError
            torch.save(state, file)
        seal(partial)


def _load(path: Path, learners: Sequence[Learner]) -> Progress:
    if not path.is_file():
        return Progress(0, 0.0, Scores(0.0, {}, {}), 0.0, False)
    state = read_tensors(path, learners[0].device)
    try:
        for learner, (model, optimizer) in zip(learners, state["learners"], strict=True):
            learner.model.load_state_dict(model)
            check_optimizer(optimizer, learner.optimizer)
            learner.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(state["random"].cpu())
        epochs, rate, scores, *rest = state["progress"]
        return Progress(epochs, rate, Scores(*scores), *rest)
    except Exception as error:  # any error of PyTorch on another person's file
        raise UserError(f"{path} is not a checkpoint of this exam ({one_line(error)[:200]}): remove it") from error

"""The loss per byte of text, which models with different tokenizers share."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from seqarch.data.datamodule import EvaluationSet, HoldOut, TextDataModule
from seqarch.data.tokenizers import ByteTokenizer, Tokenizer
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Scores, Task
from seqarch.runs import tags


class BitsPerByte(Task):
    """The loss on each domain's evaluation set in bits per byte of UTF-8 text, `bits_per_byte/<role>/<domain>`.

    It is the sum of the losses in nats, over ln 2 times the bytes of the predicted tokens. The token that ends or
    begins a document has no byte, and its loss counts. A part of a character, where a sequence begins or ends, counts
    as three bytes. In a Chinese text this changed the number of bytes by less than 0.1 %. The set's sequences begin
    where the tokenizer has them, so two tokenizers measure nearly, not exactly, the same text. `LossByDomain` gives the
    same values.
    """

    group = "loss"

    def prepare(self, data: TextDataModule) -> None:
        self.sets = data.evaluation_sets()
        self.n_bytes = [text_bytes(each, data.tokenizer) for each in self.sets]

    def score(self, scorer: Scorer) -> Scores:
        metrics = {}
        for each, n_bytes in zip(self.sets, self.n_bytes, strict=True):
            nats = scorer.measure(each.tokens, lambda losses, *_: losses.double().sum(dim=1), segments=each.segments)
            metrics |= bits_per_byte(each, float(nats.sum()), n_bytes)
        return Scores(metrics)


def bits_per_byte(of: HoldOut | EvaluationSet, nats: float, n_bytes: int) -> dict[str, float]:
    """The metric of a set from the sum of its losses and the bytes of its predicted tokens; without bytes none."""
    return {tags.bits_per_byte(of.role, of.domain): nats / (math.log(2) * n_bytes)} if n_bytes else {}


def text_bytes(of: HoldOut | EvaluationSet, tokenizer: Tokenizer) -> int:
    """Bytes of the text of all predicted tokens of a set.

    Raises:
        UserError: the tokenizer needs a package that is not installed.
    """
    return sum(predicted_bytes(tokenizer, document) for document in _documents(of))


def _documents(of: HoldOut | EvaluationSet) -> Iterable[Tensor]:
    """What a model reads by itself: the sequences of a set; with a document mask the documents in each."""
    for index in range(len(of.tokens)):
        row = of.tokens[index]
        if of.segments is None:
            yield row
        else:
            inside = of.segments[index]
            yield from (row[inside == number] for number in torch.unique(inside[inside > 0]))


def predicted_bytes(tokenizer: Tokenizer, row: Tensor) -> int:
    """Bytes of the text of a row's tokens after the first one."""
    ids = row.tolist()
    if isinstance(tokenizer, ByteTokenizer):
        return sum(each != tokenizer.eos_id for each in ids[1:])
    documents: list[list[int]] = [[]]
    for token in ids:
        if token in (tokenizer.eos_id, tokenizer.bos_id):
            documents.append([])
        else:
            documents[-1].append(token)
    # each by itself: SentencePiece leaves out the space before the first word of a text only, which no document has
    texts = [tokenizer.decode(each) for each in (*documents, ids[:1]) if each]
    n_bytes = [len(text.encode()) for text in texts]
    return sum(n_bytes[:-1]) - n_bytes[-1]

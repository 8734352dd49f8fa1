"""The loss per byte of text, which models with different tokenizers share."""

import math

from torch import Tensor

from seqarch.data.datamodule import TextDataModule
from seqarch.data.tokenizers import ByteTokenizer, Tokenizer
from seqarch.errors import UserError
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Scores, Task
from seqarch.runs import tags


class BitsPerByte(Task):
    """The loss on each domain's evaluation set in bits per byte of UTF-8 text, `bits_per_byte/<role>/<domain>`.

    It is the sum of the losses in nats, over ln 2 times the bytes of the predicted tokens. The token that ends or
    begins a document has no byte, and its loss counts. The set's sequences begin where the tokenizer has them, so two
    tokenizers measure nearly, not exactly, the same text.
    """

    group = "loss"

    def prepare(self, data: TextDataModule) -> None:
        self.sets = data.evaluation_sets()
        if any(each.segments is not None for each in self.sets):
            raise UserError("BitsPerByte reads whole sequences: set data.document_mask to false")

    def score(self, scorer: Scorer) -> Scores:
        metrics = {}
        for each in self.sets:
            nats = scorer.measure(each.tokens, lambda losses, tokens: losses.double().sum(dim=1)).sum()
            n_bytes = sum(predicted_bytes(scorer.text, row) for row in each.tokens)
            metrics[tags.bits_per_byte(each.role, each.domain)] = float(nats) / (math.log(2) * n_bytes)
        return Scores(metrics)


def predicted_bytes(tokenizer: Tokenizer, row: Tensor) -> int:
    """Bytes of the text of a row's tokens after the first one."""
    ids = row.tolist()
    if isinstance(tokenizer, ByteTokenizer):
        return sum(each != tokenizer.eos_id for each in ids[1:])
    # the first token keeps the space that a text's first word loses when it is decoded
    whole, first = (tokenizer.decode(each) for each in (ids, ids[:1]))
    return len(whole.encode()) - len(first.encode())

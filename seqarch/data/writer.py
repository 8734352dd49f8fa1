"""Writes the shards and the document index of one split."""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.data.manifest import SplitSummary
from seqarch.data.shards import BLOCKS, DOCUMENT, DOCUMENTS, DTYPES, INDEX, PLAIN_TOKENS, block_checksums
from seqarch.data.tokenizers import Tokenizer
from seqarch.data.verified import remember, sha256_of

CHUNK_TOKENS = 1 << 25
"""Tokens in a shard file (64 or 128 MiB), all but the last of a split."""

_INDEX_CONFIG: dict[str, Any] = {
    **dict.fromkeys(("chunk_size", "compression", "compression_batch_size", "compression_level", "encryption")),
    "ipc_compression": None,
    "data_spec": PLAIN_TOKENS,
    "item_loader": "TokensLoader",
    "types": "tensor",
}
"""What litdata 0.2.76 writes into the index of such shards, without `chunk_bytes` and `data_format`."""

COUNTED = 1 << 20
"""Tokens that are counted at once: numpy takes four times their memory."""


class SplitWriter:
    """Writes the shards and the document index of one split."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._index, self._blocks = (folder / DOCUMENTS).open("wb"), (folder / BLOCKS).open("wb")
        self._pending: list[np.ndarray] = []
        self._n_pending = 0
        self._chunks: list[dict[str, Any]] = []
        self._counts, self._dtype = np.zeros(tokenizer.vocab_size, np.int64), tokenizer.dtype
        self._digest = hashlib.sha256()
        self._documents = self._tokens = self._text_bytes = 0

    def add(self, tokens: np.ndarray, rows: np.ndarray, text_bytes: int) -> None:
        """Append documents: their tokens, and for each `[n, 3]` its file, line and number of tokens.

        The tokens of documents may also follow in later calls without rows.
        """
        entries = np.empty(len(rows), DOCUMENT)
        entries["offset"] = self._tokens + np.cumsum(rows[:, 2]) - rows[:, 2]
        entries["file"], entries["line"] = rows[:, 0], rows[:, 1]
        self._index.write(entries.tobytes())
        for start in range(0, len(tokens), COUNTED):
            self._counts += np.bincount(tokens[start : start + COUNTED], minlength=len(self._counts))
        self._digest.update(tokens.astype(self._dtype, copy=False).data)
        self._documents += len(rows)
        self._tokens += len(tokens)
        self._text_bytes += text_bytes
        self._pending.append(tokens)
        self._n_pending += len(tokens)
        while self._n_pending >= CHUNK_TOKENS:
            self._flush(CHUNK_TOKENS)

    def _flush(self, n_tokens: int) -> None:
        """Write the first `n_tokens` pending tokens as a file in litdata's format: a header and one item."""
        pending = np.concatenate(self._pending) if len(self._pending) > 1 else self._pending[0]
        tokens = pending[:n_tokens].astype(self._dtype)
        name, n_bytes = f"chunk-0-{len(self._chunks)}.bin", 12 + tokens.nbytes
        header = np.array([1, 12, n_bytes], "<u4")  # items, where the first begins, where it ends
        (self._folder / name).write_bytes(header.tobytes() + tokens.tobytes())
        self._chunks.append({"chunk_bytes": n_bytes, "chunk_size": 1, "dim": n_tokens, "filename": name})
        self._blocks.write(np.array(block_checksums(tokens), "<u4").tobytes())
        self._pending = [pending[n_tokens:]]
        self._n_pending = len(pending) - n_tokens

    def close(self) -> SplitSummary:
        if self._n_pending:
            self._flush(self._n_pending)
        self._index.close()
        self._blocks.close()
        if self._chunks:
            size = self._dtype.itemsize * CHUNK_TOKENS + 64
            data_format = [name for name, dtype in DTYPES.items() if dtype == self._dtype]
            config = {**_INDEX_CONFIG, "chunk_bytes": size, "data_format": data_format}
            index = json.dumps({"chunks": self._chunks, "config": config}, sort_keys=True)
            (self._folder / INDEX).write_text(index)
        files = {path.name: sha256_of(path) for path in sorted(self._folder.iterdir())}
        for name, checksum in files.items():
            remember([self._folder / name], checksum)
        used = self._counts[self._counts > 0] / max(1, self._tokens)
        entropy = -math.fsum(used * np.log(used))
        return SplitSummary(self._documents, self._tokens, self._text_bytes, entropy, self._digest.hexdigest(), files)

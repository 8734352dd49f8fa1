"""The shards of object storage that training needs now and next, on the disk of this machine."""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from seqarch.data.order import DomainOrder
from seqarch.data.shards import PackedSequences, Shards
from seqarch.errors import UserError

GROUPS = 3
"""Groups of shards on disk: the one that is read, the next, and the last, which other processes may still read."""


class ShardCache:
    """Fetches the shards of each group while the group before it is read, once for all processes of a machine.

    Shards that are no longer needed make room for the next, the longest unused first.

    Args:
        sequences: the training splits, which lie in mirrors.
        orders: the order of each.
        max_bytes: of all shards of the training splits; by default as few as can be.

    Raises:
        UserError: `max_bytes` is too small for three groups of each domain.
    """

    def __init__(
        self, sequences: Sequence[PackedSequences], orders: Sequence[DomainOrder], max_bytes: float | None
    ) -> None:
        self.shards = [each.shards for each in sequences]
        self.orders = orders
        needed = sum(
            max(shards.sizes) * min(GROUPS * order.window, len(shards.sizes)) if order.window else sum(shards.sizes)
            for shards, order in zip(self.shards, orders, strict=True)
        )
        if max_bytes is not None and max_bytes < needed:
            raise UserError(
                f"data.cache_gb is {max_bytes / 1e9:g}, but {GROUPS} windows of shards take {needed / 1e9:.3g} GB: "
                "make it larger, or data.shuffle_window smaller"
            )
        self.max_bytes = max_bytes or needed
        self._entered: dict[int, int] = {}
        self._kept: dict[int, set[Path]] = {}
        self._fetcher: threading.Thread | None = None

    def enter(self, domain: int, group: int) -> None:
        """Say that this process now reads a group; if it is another than before, the next one is fetched."""
        if self._entered.get(domain) == group:
            return
        self._entered[domain] = group
        shards, order = self.shards[domain], self.orders[domain]
        groups = [order.shards_of(each) for each in range(max(0, group - 1), group + 2)]
        self._kept[domain] = {shards.paths[shard] for shards_of in groups for shard in shards_of}
        self._make_room()
        wanted = [*groups[-2], *groups[-1]]
        self._fetcher = threading.Thread(target=_fetch, args=(shards, wanted, self._fetcher), daemon=True)
        self._fetcher.start()

    def _make_room(self) -> None:
        kept = set().union(*self._kept.values())
        folders = {shards.folder for shards in self.shards}
        sizes, used = {}, {}
        for path in (path for folder in folders for path in folder.glob("*.bin")):
            with contextlib.suppress(FileNotFoundError):
                if path in kept:
                    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                stat = path.stat()
                sizes[path], used[path] = stat.st_size, stat.st_atime_ns
        all_sizes = {
            path: size for shards in self.shards for path, size in zip(shards.paths, shards.sizes, strict=True)
        }
        room = self.max_bytes - sum(sizes.values()) - sum(all_sizes[path] for path in kept - sizes.keys())
        for path in sorted(sizes.keys() - kept, key=used.__getitem__):
            if room >= 0:
                return
            path.unlink(missing_ok=True)
            room += sizes[path]


def _fetch(shards: Shards, wanted: Sequence[int], before: threading.Thread | None) -> None:
    if before is not None:
        before.join()
    for shard in wanted:
        with contextlib.suppress(UserError, OSError):  # the reader meets it too, and says so
            shards.verify(shard)

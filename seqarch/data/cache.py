"""Keeps the shards that training needs now and next in memory, and shards from object storage also on disk."""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from seqarch.data.order import DomainOrder
from seqarch.data.remote import origin
from seqarch.data.shards import PackedSequences, Shards
from seqarch.errors import UserError

GROUPS = 3
"""Groups of shards on disk: the one that is read, the next, and the last, which other processes may still read."""


class ShardCache:
    """Reads the shards of each group while the group before it is in use.

    Shards in object storage are fetched once for all processes of a machine. Shards that are no longer needed make room
    for the next, the longest unused first. Shards on a disk are brought into memory one after the other, which is
    faster than sample by sample. Local domains without windows are left as they are, as a run may need little of them.

    Args:
        sequences: the training splits.
        orders: the order of each.
        gigabytes: of all shards of the training splits from object storage; by default as few as can be.

    Raises:
        UserError: `gigabytes` is too small for three groups of each domain, or given for shards on a disk.
    """

    def __init__(
        self, sequences: Sequence[PackedSequences], orders: Sequence[DomainOrder], gigabytes: float | None
    ) -> None:
        self.shards = [each.shards for each in sequences]
        self.orders = orders
        needed = sum(
            max(shards.sizes) * min(GROUPS * order.window, len(shards.sizes)) if order.window else sum(shards.sizes)
            for shards, order in zip(self.shards, orders, strict=True)
        )
        self.remote = origin(self.shards[0].folder) is not None
        self.max_bytes = needed if gigabytes is None else 1e9 * gigabytes
        if gigabytes is not None and not self.remote:
            raise UserError("data.cache_gb is for shards in object storage, and these lie on a disk: leave it out")
        if not self.max_bytes >= needed:
            least = f"{needed / 1e9:.3g}, which holds {GROUPS} of data.shuffle_window"
            raise UserError(f"data.cache_gb must be at least {least}, not {gigabytes:g}")
        in_memory = needed < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
        self.reads_ahead = self.remote or (in_memory and all(order.window for order in orders))
        self._entered: dict[int, range] = {}
        self._kept: dict[int, set[Path]] = {}
        self._reader: threading.Thread | None = None

    def enter(self, domain: int, turn: int) -> None:
        """Say that this process now reads a domain's `turn`-th sample. If its group is new, read ahead."""
        shards, order = self.shards[domain], self.orders[domain]
        if not self.reads_ahead or turn in self._entered.get(domain, ()):
            return
        group = order.group(turn)
        self._entered[domain] = order.turns_of(group)
        groups = [order.shards_of(each) for each in range(max(0, group - 1), group + 2)]
        self._kept[domain] = {shards.paths[shard] for shards_of in groups for shard in shards_of}
        if self.remote:
            self._make_room()
        first = os.getpid() % len(groups[-1])  # processes that share a disk begin with different shards
        wanted = [shard for each in groups[-2:] for shard in (*each[first:], *each[:first])]
        self._reader = threading.Thread(target=_read_ahead, args=(shards, wanted, self._reader), daemon=True)
        self._reader.start()

    def _make_room(self) -> None:
        kept = set().union(*self._kept.values())
        all_sizes = {path: size for each in self.shards for path, size in zip(each.paths, each.sizes, strict=True)}
        sizes, used = {}, {}
        for path in all_sizes:
            with contextlib.suppress(FileNotFoundError):
                if path in kept:
                    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                stat = path.stat()
                sizes[path], used[path] = stat.st_size, stat.st_atime_ns
        room = self.max_bytes - sum(sizes.values()) - sum(all_sizes[path] for path in kept - sizes.keys())
        for path in sorted(sizes.keys() - kept, key=used.__getitem__):
            if room >= 0:
                return
            path.unlink(missing_ok=True)
            room += sizes[path]


def _read_ahead(shards: Shards, wanted: Sequence[int], before: threading.Thread | None) -> None:
    if before is not None:
        before.join()
    for shard in wanted:
        with contextlib.suppress(UserError, OSError):  # the reader meets it too, and says so
            shards.verify(shard)
            if hasattr(os, "posix_fadvise"):
                with shards.paths[shard].open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

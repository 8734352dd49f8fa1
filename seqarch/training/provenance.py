"""The text that a model was trained and measured on, as its checkpoints note it, and where it lies."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqarch.data.corpus import find_root
from seqarch.data.datamodule import TextDataModule
from seqarch.data.manifest import Checked
from seqarch.data.remote import is_remote
from seqarch.errors import UserError
from seqarch.runs.folder import run_of


@dataclass(frozen=True)
class Provenance(Checked):
    """What a checkpoint notes of its data. One of an earlier version may lack all but `tokenizer`.

    Args:
        tokenizer: its name.
        hold_outs: SHA-256 of the tokens of each whole hold-out, by domain.
        sources: names of the files that the training text came from, by SHA-256.
        root: `data.root` of the run.
        folder: the same as an absolute path; "" for object storage.
        folder_from_run: `folder` relative to the run folder, for runs that are moved together with their shards.
    """

    tokenizer: str
    hold_outs: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    root: str = ""
    folder: str = ""
    folder_from_run: str = ""

    @classmethod
    def of_run(cls, data: TextDataModule, run: Path) -> "Provenance":
        """The provenance of the checkpoints that a run writes."""
        folder = "" if is_remote(data.root) else os.path.abspath(find_root(data.root))
        relative = folder and os.path.relpath(folder, run)
        checksums = data.hold_out_checksums(), data.training_files()
        return cls(data.tokenizer.name, *checksums, data.root, folder, relative)

    @classmethod
    def of_checkpoint(cls, content: Mapping[str, Any]) -> "Provenance":
        """The provenance in a checkpoint; a `TypeError` says what in it is of a wrong type."""
        names = [each.name for each in dataclasses.fields(cls) if each.name in content["seqarch"]]
        return cls(**{"tokenizer": None, **{name: content["seqarch"][name] for name in names}})

    def check(self, data: TextDataModule, measured: Path) -> None:
        """Raise `UserError` if `data` have other text under the name of a domain than `measured` was measured on."""
        self.check_tokenizer(data, measured)
        for domain, checksum in data.hold_out_checksums().items():
            if self.hold_outs.get(domain, checksum) != checksum:
                raise UserError(f"{data.root} has another hold-out of '{domain}' than {measured}: restore or rename it")

    def check_tokenizer(self, data: TextDataModule, trained: object) -> None:
        """Raise `UserError` if `data` have another tokenizer than the text that `trained` was trained on."""
        if (now := data.tokenizer.name) != self.tokenizer:
            raise UserError(f"{data.root} has the tokenizer {now}, but {trained} was trained with {self.tokenizer}")

    def find(self, data: TextDataModule, checkpoint: Path, *, named: bool) -> None:
        """Let `data` read the text that the checkpoint was measured on.

        It lies at `data.root`, or where it was in training, or where it was as seen from the run folder. The checksums
        decide. A root that the user `named`, or that is not the run's, is not replaced.

        Raises:
            UserError: it lies at none of these places.
        """
        places = [data.root]
        if not named and data.root == self.root and self.folder:
            others = self.folder, os.path.normpath(run_of(checkpoint) / self.folder_from_run)
            places += [place for place in dict.fromkeys(others) if Path(place).is_dir()]
        refusals = []
        for place in places:
            data.read_from(place)
            try:
                return self.check(data, checkpoint)
            except UserError as error:
                refusals.append(f"{error}")
        raise UserError("; ".join(refusals))

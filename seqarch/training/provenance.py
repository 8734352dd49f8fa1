"""The text that a model was trained and measured on, as its checkpoints note it, and where it lies.

`seqarch fit --run_dir NEW --from RUN` goes on from the checkpoint of another run.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqarch.data.corpus import find_root
from seqarch.data.datamodule import TextDataModule
from seqarch.data.remote import is_remote
from seqarch.errors import UserError, say
from seqarch.runs.files import Checked
from seqarch.runs.folder import CURVES, named_checkpoint, read_config, run_of
from seqarch.runs.keys import flatten


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


TEXT = {"train", "shards", "sequence_length", "pack"}
"""What makes another order of other rows of the training text, which then begins at its start."""
MEASURED = ("data.eval_", "data.ood", "ood_loss.tasks", "recall_probe.", "attention_entropy.")
WHEN = (".every_n_steps", ".at")
"""What the measurements depend on, by the beginnings of its keys, without what says when to measure."""


def continue_text(checkpoint: dict[str, Any], data: TextDataModule, origin: str) -> bool:
    """Let training go on in the text of a checkpoint; whether it does.

    If the text is another, it and Lightning's epoch begin again.

    Raises:
        UserError: the text has another tokenizer.
    """
    Provenance.of_checkpoint(checkpoint).check_tokenizer(data, origin)
    if not (changed := sorted(TEXT & {*data.changed_since(checkpoint["TextDataModule"])})):
        return True
    say(f"{', '.join(changed)} differ from those of {origin}: the training text begins at its start")
    data.load_state_dict({})
    state, progress = checkpoint["TextDataModule"], checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    # as after the first step of an epoch: Lightning completes the last batch of a checkpoint when it resumes
    more = progress["current"]["ready"] - state["sequences_per_step"] // state["sequences_per_micro_step"]
    progress["current"] = {what: count - more for what, count in progress["current"].items()}
    return False


def measures_alike(noted: Mapping[str, Any], config: Mapping[str, Any], data: TextDataModule, origin: Path) -> bool:
    """Whether a run measures what the run that it comes from has measured, if it has, so that both have one curve.

    Args:
        noted: what the checkpoint of the other run notes of its data.
        config: of the new run.
        data: of the new run.
        origin: the other run.
    """
    if not (origin / CURVES).is_file():
        return False
    before, now = flatten(read_config(origin)), flatten(config)
    keys = (key for key in before.keys() & now.keys() if key.startswith(MEASURED) and not key.endswith(WHEN))
    changed = sorted(key for key in keys if before[key] != now[key])
    held_out = noted.get("hold_outs", {})
    changed += [
        f"the hold-out of {name}" for name, sha in data.hold_out_checksums().items() if held_out.get(name, sha) != sha
    ]
    if changed:
        say(f"{', '.join(changed)} differ from those of {origin}: its curves stay there")
    return not changed


def origin_of(config: Mapping[str, Any]) -> Path | None:
    """The run folder that a run goes on from, if it does."""
    return run_of(named_checkpoint(config["from"])) if config.get("from") else None

"""A run that goes on from the checkpoint of another run: `seqarch fit --run_dir NEW --from RUN`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seqarch.data.datamodule import TextDataModule
from seqarch.errors import say
from seqarch.runs.folder import CURVES, named_checkpoint, read_config, run_of
from seqarch.runs.keys import flatten
from seqarch.training.provenance import Provenance

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

"""The costs of a model's runs: speed, memory, time, hardware and commit."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from seqarch.report.runs import Group, Run
from seqarch.runs import tags
from seqarch.runs.folder import read_note


@dataclass(frozen=True)
class Costs:
    """The costs over all seeds of a model; `None` if not noted. Semicolons separate several machines or versions."""

    tokens_per_second: float | None
    """The median."""
    mfu: float | None
    """The median."""
    peak_gib: float | None
    """The largest peak."""
    minutes_a_run: float | None
    """The mean of the longest runs."""
    hardware: str
    commits: list[str]
    versions: str


def costs(group: Group) -> Costs:
    """The costs of a model."""
    minutes = [taken for run in group.runs if run.tokens == group.tokens and (taken := _minutes(run)) is not None]
    return Costs(
        tokens_per_second=over_runs(group.runs, tags.TOKENS_PER_SECOND, np.median),
        mfu=over_runs(group.runs, tags.MFU, np.median),
        peak_gib=over_runs(group.runs, tags.PEAK_MEMORY, np.max),
        minutes_a_run=float(np.mean(minutes)) if minutes else None,
        hardware="; ".join(dict.fromkeys(map(_hardware, group.runs))),
        commits=list(dict.fromkeys(str(run.facts["commit"]) for run in group.runs if run.facts.get("commit"))),
        versions="; ".join(dict.fromkeys(map(_versions, group.runs))),
    )


def over_runs(runs: Sequence[Run], tag: str, what: Any) -> float | None:
    """`what` of all finite values of a tag, `None` if there are none."""
    values = [curve.value[np.isfinite(curve.value)] for run in runs if (curve := run.curves.get(tag)) is not None]
    joined = np.concatenate(values) if values else np.empty(0)
    return float(what(joined)) if len(joined) else None


def _hardware(run: Run) -> str:
    """ "1 x NVIDIA H200"."""
    noted = run.facts.get("hardware") or {}
    return f"{noted.get('devices', '?')} x {noted.get('device', 'unknown')}"


def _versions(run: Run) -> str:
    """ "seqarch 0.1.0, torch 2.13.0", without packages that were not installed."""
    return ", ".join(f"{name} {version}" for name, version in (run.facts.get("versions") or {}).items() if version)


def _minutes(run: Run) -> float | None:
    """Minutes that an exam noted, without interruptions, or the minutes from the run's start to its end."""
    try:
        if (noted := read_note(run.folder).get("minutes")) is not None:
            return float(noted)
        started, finished = (datetime.fromisoformat(run.facts[key]) for key in ("started", "finished"))
        return (finished - started).total_seconds() / 60
    except (KeyError, ValueError, TypeError):  # none is noted, or none that is a time
        return None

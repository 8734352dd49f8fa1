"""Keys of a configuration: flattened to dotted names, compared, and which of them may differ."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

WHERE_IT_RUNS = (
    *("run_dir", "ckpt_path", "from", "checkpoint"),
    *("trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.enable_progress_bar", "trainer.max_time"),
    *("data.root", "data.num_workers", "data.micro_batch_size"),
)
"""Keys that say where a run trains, not what it trains. The datamodule checks shards and micro-batches itself."""
OPTIMISATION = (
    *("learning_rate", "warmup_steps", "rewarm_steps", "schedule", "decay_share", "optimizer", "betas", "weight_decay"),
    *("compile", "activation_checkpointing", "float8"),
)
MAY_DIFFER = {
    "resume": WHERE_IT_RUNS,
    "exam": WHERE_IT_RUNS,
    "checkpoint": (*(f"model.{name}" for name in OPTIMISATION), "*.backend"),
    "seeds": ("model.learning_rate", "model.compile", "model.activation_checkpointing", "*.backend"),
    "report": ("run_dir", "extends", "ckpt_path", "from"),
}
"""By use, the keys (with all below them) that may differ: when `fit` resumes in a run folder, between two runs that an
exam treats as one, between a checkpoint and the model that loads it, between the models of two seeds. A report does not
list differences in "report".
"""


def may_differ(key: str, use: str) -> bool:
    """Whether a dotted key may differ for one of the uses in `MAY_DIFFER`."""
    return any(
        key.endswith(name[1:]) if name.startswith("*") else f"{key}.".startswith(f"{name}.") for name in MAY_DIFFER[use]
    )


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings, and of lists of mappings, by their dotted names.

    `{"model": {"d": 8}}` becomes `{"model.d": 8}`. An empty mapping is a leaf.
    """
    if isinstance(tree, Mapping) and tree:
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list) and any(isinstance(value, Mapping) for value in tree):
        items = enumerate(tree)
    else:
        return {prefix: tree}
    dotted = ((f"{prefix}.{name}" if prefix else str(name), branch) for name, branch in items)
    return {key: value for name, branch in dotted for key, value in flatten(branch, name).items()}


def without(tree: Any, use: str, prefix: str = "") -> Any:
    """Nested mappings without the keys that may differ for a use."""
    if not isinstance(tree, Mapping):
        return tree
    dotted = {name: f"{prefix}.{name}" if prefix else str(name) for name in tree}
    return {name: without(tree[name], use, key) for name, key in dotted.items() if not may_differ(key, use)}


def difference(old: Any, now: Any, use: str, complete: Callable[[Any], Any] | None = None) -> str | None:
    """The first key whose values differ and how many more do, in words; `None` if none does.

    Args:
        old: the configuration of a run or a checkpoint.
        now: the configuration that it is compared with.
        use: one of those in `MAY_DIFFER`.
        complete: gives `old`, which may be of an earlier version, the defaults of options that came since.
    """
    before, after = flatten(old), flatten(now)
    differ = sorted(key for key in {*before, *after} if before.get(key) != after.get(key) and not may_differ(key, use))
    if differ and complete is not None:
        return difference(complete(old), now, use)
    more = f" and {len(differ) - 1} more keys" if len(differ) > 1 else ""
    return f"{differ[0]} was {before.get(differ[0])}, is {after.get(differ[0])}{more}" if differ else None

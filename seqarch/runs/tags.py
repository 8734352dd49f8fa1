"""Names of metrics: the columns of `curves.csv`."""

import re
from collections.abc import Iterable

TRAIN_LOSS, LEARNING_RATE, GRADIENT_NORM = "loss/train", "learning_rate", "gradient_norm"
TOKENS_PER_SECOND, MFU, PEAK_MEMORY = "throughput/tokens_per_second", "throughput/mfu", "memory/peak_gib"
COPYING_FIRST, COPYING_AGAIN, COPYING_GAIN = "copying/loss_first", "copying/loss_again", "copying/gain"
IN_DOMAIN, OOD = "in_domain", "ood"
"""Roles of evaluated domains."""
MEAN = "mean"
"""The name of the mean of the compared domains, in tables and figures; no domain may have it."""


def loss(role: str, domain: str = "") -> str:
    """The loss on a domain's hold-out, `loss/ood/code`; without a domain the role's mean, `loss/ood`."""
    return f"loss/{role}/{domain}" if domain else f"loss/{role}"


def added_loss(name: str) -> str:
    """What mixers add to the training loss under a name; `loss/train` is with it."""
    return f"{TRAIN_LOSS}/{name}"


def bits_per_byte(role: str, domain: str) -> str:
    """The loss on a domain's hold-out in bits per byte of its text."""
    return f"bits_per_byte/{role}/{domain}"


def loss_recallable(role: str, domain: str) -> str:
    """The loss on the tokens of a hold-out that complete something seen earlier in the same sequence."""
    return f"loss_recallable/{role}/{domain}"


def loss_other(role: str, domain: str) -> str:
    """The loss on the other tokens of a hold-out."""
    return f"loss_other/{role}/{domain}"


def share_recallable(role: str, domain: str) -> str:
    """The share of the tokens of a hold-out that are recallable."""
    return f"share_recallable/{role}/{domain}"


def loss_by_position(domain: str, start: int, stop: int) -> str:
    """The loss on a domain's hold-out at positions `start` to `stop` (excluded) of the sequences."""
    return f"loss_by_position/{domain}/{start}-{stop}"


def repeat_gain(distance: int) -> str:
    """The nats per token saved on a passage that was read `distance` tokens before."""
    return f"repeat_gain/{distance}"


def repeat_gains(tags: Iterable[str]) -> dict[int, str]:
    """The tags of the saved nats, by distance."""
    return _numbered(tags, "repeat_gain/")


def position_range(tag: str) -> tuple[str, int, int] | None:
    """Domain, start and stop of a tag of `loss_by_position`, `None` for other tags."""
    found = re.fullmatch(r"loss_by_position/(.+)/([0-9]{1,18})-([0-9]{1,18})", tag)
    return (found[1], int(found[2]), int(found[3])) if found else None


def domains(tags: Iterable[str], role: str) -> list[str]:
    """The domains with a loss of that role, sorted; a mean that a user's callback logged is none."""
    prefix = f"{loss(role)}/"
    return sorted({tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)} - {MEAN})


def entropy(layer: int, head: int | None = None, *, implied: bool = False) -> str:
    """The attention entropy of a layer or head, or the entropy of its implied weights."""
    tag = f"{_entropy_prefix(implied)}{layer:02d}"
    return tag if head is None else f"{tag}/head_{head:02d}"


def entropy_layers(tags: Iterable[str], *, implied: bool = False) -> dict[int, str]:
    """The tags of the entropy of whole layers, by layer."""
    return _numbered(tags, _entropy_prefix(implied))


def _numbered(tags: Iterable[str], prefix: str) -> dict[int, str]:
    """The tags that are the prefix and a number, by their numbers, in their order."""
    ends = {tag.removeprefix(prefix): tag for tag in tags if tag.startswith(prefix)}
    return dict(sorted((int(end), tag) for end, tag in ends.items() if re.fullmatch(r"[0-9]{1,18}", end)))


def _entropy_prefix(implied: bool) -> str:
    return "implied_entropy/layer_" if implied else "entropy/layer_"

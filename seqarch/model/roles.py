"""What each parameter of a model is to an optimizer."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import nn

Role = Literal["matrix", "embedding", "head", "vector"]


class Kind(NamedTuple):
    """What an optimizer must know of a parameter. Those of one kind are one group."""

    role: Role
    """"matrix": weights of a linear layer; "embedding": a table of vectors, the tied head too; "head": one of its own;
    "vector": all else, such as norms, biases, decays, kernels of convolutions and constants."""
    decayed: bool
    """Whether weight decay applies."""
    heights: tuple[int, ...] = ()
    """Rows of each matrix that lie below each other in a "matrix"."""


class Scaling(NamedTuple):
    """What a parameter's initial values depend on as `d_model` grows (`seqarch.model.transfer`)."""

    inputs_at: Callable[[int], int] | None
    """The number of inputs at a `d_model`; `None` where it grows as `d_model` does."""
    fixed_std: bool
    """Whether outputs of the initial parameter grow with the square root of its inputs."""
    orthogonal: bool
    """Whether it starts with orthogonal columns of the same length at all widths."""


def scalings_of(lm: nn.Module) -> dict[str, Scaling]:
    """The scaling of each parameter of a model, by name: `has_few_inputs` and `has_fixed_std` note it."""
    marks = {"_inputs_at": None, "_fixed_std": False, "_orthogonal": False}
    return {
        name: Scaling(*(getattr(parameter, mark, default) for mark, default in marks.items()))
        for name, parameter in lm.named_parameters()
    }


def kinds_of(lm: nn.Module) -> dict[str, Kind]:
    """The kind of each parameter of a model, by name; tied weights count once.

    A mixer says with `is_fused` which of its layers are several matrices, and with `leave_undecayed` which parameters
    do not decay. All else follows from the layer that holds a parameter, so a plug-in need not say anything.
    """
    named = [
        (f"{path}.{name}" if path else name, layer, parameter)
        for path, layer in lm.named_modules()
        for name, parameter in layer.named_parameters(recurse=False)
    ]
    kinds: dict[nn.Parameter, tuple[str, Kind]] = {}
    for name, layer, parameter in named:
        kinds.setdefault(parameter, (name, _kind_of(name, layer, parameter)))
    return dict(kinds.values())


def _kind_of(name: str, layer: nn.Module, parameter: nn.Parameter) -> Kind:
    decayed = is_decayed(parameter)
    if isinstance(layer, nn.Embedding):
        return Kind("embedding", decayed)
    if not isinstance(layer, nn.Linear) or parameter.dim() != 2 or min(parameter.shape) < 2:
        return Kind("vector", decayed)
    if name == "head.weight":
        return Kind("head", decayed)
    return Kind("matrix", decayed, getattr(parameter, "_heights", (len(parameter),)))


def is_decayed(parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to parameters with at least two dimensions longer than one, unless marked."""
    return sum(size > 1 for size in parameter.shape) >= 2 and not getattr(parameter, "_no_weight_decay", False)

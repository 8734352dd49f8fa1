"""Canon layers: residual short convolutions at four places of a block, around any mixer.

"Physics of Language Models: Part 4.1", arXiv 2512.17351. Defaults, places and initial values follow the authors' code,
github.com/facebookresearch/PhysicsLM4, lingua_modified/lingua: canon_helper.py and transformer.py.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from seqarch.arguments import Limited
from seqarch.errors import UserError
from seqarch.mixers.base import Layer
from seqarch.mixers.short_convolution import Kernel, ShortConvolution

PLACES = {"A": "before the mixer", "B": "inside it", "C": "before the feed-forward layer", "D": "inside it"}


class CanonLayer(ShortConvolution):
    """`x + conv(x)`, or `conv(x)` without `residual`; see `ShortConvolution` for the rest.

    Args:
        channels: number of channels.
        kernel_size: tokens that an output sees, its own included.
        residual: whether the input is added.
        activation: "silu" or `None`.
    """

    def __init__(self, channels: int, kernel_size: int, *, residual: bool, activation: Literal["silu"] | None) -> None:
        super().__init__(channels, kernel_size, activation=activation)
        self.residual = residual

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        y = super().forward(x, state=state, cu_seqlens=cu_seqlens)
        return x + y if self.residual else y


class Canon(Limited):
    """Which Canon layers a model has, and their variant.

    Args:
        places: some of "A", before the mixer; "B", on the queries, keys and values inside it; "C", before the
            feed-forward layer; "D", inside it, before the activation. A and C come after the norm.
        conv_size: tokens that an output sees, its own included.
        residual: whether a layer's input is added to its output.
        activation: "silu" or `null`.
    """

    option_prefix: ClassVar[str] = "canon."
    renamed: ClassVar[Mapping[str, str]] = {"kernel_size": "conv_size"}

    def __init__(
        self,
        places: str = "ABCD",
        *,
        conv_size: Kernel = 4,
        residual: bool = True,
        activation: Literal["silu"] | None = None,
    ) -> None:
        if not places or {*places} - {*PLACES} or len({*places}) < len(places):
            raise UserError(f"canon.places must hold some of A, B, C and D, each once, not '{places}'")
        self.places = places
        self.variant: dict[str, Any] = {"kernel_size": conv_size, "residual": residual, "activation": activation}

    def layer(self, place: str, channels: int) -> CanonLayer | None:
        """The layer at a place; `None` if there is none."""
        return CanonLayer(channels, **self.variant) if place in self.places else None

    def put_inside(self, layer: Layer, place: str) -> None:
        """Give a mixer its "B", or a feed-forward layer its "D".

        Raises:
            UserError: the layer declares no place for it (`canon_channels`).
        """
        if place not in self.places:
            return
        if layer.canon_channels is None:
            raise UserError(f"canon.places has {place}, but {type(layer).__name__} has no place for it: leave it out")
        layer.canon = self.layer(place, layer.canon_channels)

    def check(self, model: Any) -> None:
        """Refuse places that no block of a model has."""
        parts = {"A": "mixer", "B": "mixer", "C": "feed_forward", "D": "feed_forward"}
        for place in self.places:
            if all(getattr(block, parts[place]) is None for block in model):
                raise UserError(f"canon.places has {place}, but no block has a {parts[place]}: leave {place} out")

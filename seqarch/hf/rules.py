"""How the tensors of a published family are named and laid out there and here; each rule works in both directions."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig

from seqarch.errors import UserError, one_of, refused

Layout = Literal["same", "transposed", "depthwise", "broadcast"]
"""The published form: as here, a matrix `[in, out]`, a convolution `[channels, 1, size]` or a vector `[1, 1, n]`."""
Config = Mapping[str, Any]
Options = Mapping[str, Any]
"""The options of a `SequenceLM`, as a recipe has them."""
Entries = dict[str, Any]
Fixed = dict[str, tuple[Any, ...]]
BLOCK = "lm.blocks.{i}."
NAMES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "tie_embeddings": "tie_word_embeddings",
}
"""Options of the model, and what most families call them."""


class Rule(NamedTuple):
    """One tensor here, and the published ones that it joins along its first dimension.

    Args:
        ours: its name, `{i}` for the layer.
        theirs: their names.
        layout: of the published tensors.
        sizes: rows of each published tensor, where there are several.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = "same"
    sizes: tuple[int, ...] = ()

    def of_layer(self, layer: int) -> "Rule":
        """The rule with the number of a layer in place of `{i}`."""
        names = (each.replace("{i}", str(layer)) for each in (self.ours, *self.theirs))
        ours, *theirs = names
        return self._replace(ours=ours, theirs=tuple(theirs))

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensor here."""
        parts = [_published(each, self.layout, back=False) for each in tensors]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def to_theirs(self, tensor: Tensor) -> list[Tensor]:
        """The published tensors."""
        parts = tensor.split(self.sizes) if self.sizes else (tensor,)
        return [_published(each, self.layout, back=True).contiguous() for each in parts]


class Family(ABC):
    """A published family: how its configuration and its tensors become ours, and ours become its own."""

    model_type: ClassVar[str]
    """Its name in `config.json`."""
    architecture: ClassVar[str]
    """Its class in transformers."""
    mixer: ClassVar[str]
    """Our mixer of all its layers."""
    names: ClassVar[Entries]
    """Options of our model, and what `config.json` calls them."""
    mixer_names: ClassVar[Entries] = {}
    """Options of the mixer, and what `config.json` calls them."""
    always: ClassVar[Entries] = {}
    """Further options of our model."""
    feed_forward: ClassVar[str | None] = None
    """Our feed-forward layer."""
    hidden: ClassVar[str] = "intermediate_size"
    """The width of the feed-forward layer in `config.json`."""
    defaults: ClassVar[Entries] = {}
    """Further entries that `config.json` may lack."""
    fixed: ClassVar[Fixed]
    """Keys of `config.json` that change what is computed, with the only values that seqarch computes."""
    layer: ClassVar[str] = "model.layers.{i}."
    """What the names of a layer's tensors begin with."""
    prefix: ClassVar[str] = ""
    """What all names begin with, except in some files."""
    dropped: ClassVar[tuple[str, ...]] = ()
    """Endings of names of tensors that hold no weights."""

    def declared(self) -> dict[str, Any]:
        """The defaults of the class of `config.json`, which may lack them."""
        parameters = inspect.signature(self.config_class()).parameters
        return {name: each.default for name, each in parameters.items() if each.default is not each.empty}

    def config_class(self) -> type[PreTrainedConfig]:
        """The class of `config.json`; not that of `AutoConfig`, which gives fla's once fla is imported."""
        return getattr(transformers, self.architecture).config_class

    def complete(self, c: Config) -> dict[str, Any]:
        """`config.json` with the entries that it may lack."""
        return {**self.defaults, **c}

    def options(self, c: Config) -> dict[str, Any]:
        """The options of `SequenceLM`, as a recipe has them, from `config.json`."""
        c = self.complete(c)
        mixer = {ours: c[theirs] for ours, theirs in self.mixer_names.items()} | self.mixer_options(c)
        width = self.feed_forward and {"class_path": self.feed_forward, "init_args": {"hidden": c[self.hidden]}}
        return {
            **{ours: c[theirs] for ours, theirs in self.names.items()},
            **self.always,
            "mixers": {"mixer": {"class_path": self.mixer, "init_args": mixer}},
            "feed_forward": width,
        }

    def mixer_options(self, c: Config) -> dict[str, Any]:
        """The mixer's options that `mixer_names` has not."""
        return {}

    def config(self, model: Options) -> dict[str, Any]:
        """`config.json` of a model's options.

        Raises:
            UserError: the model has other layers than the family.
        """
        mixer = self.mixer_of(model)
        config = {theirs: model[ours] for ours, theirs in self.names.items()}
        config |= {theirs: mixer[ours] for ours, theirs in self.mixer_names.items()}
        if self.feed_forward:
            config[self.hidden] = ((model.get("feed_forward") or {}).get("init_args") or {}).get("hidden")
        return self.complete(config | self.mixer_config(mixer, model["d_model"]))

    def mixer_config(self, mixer: Options, width: int) -> dict[str, Any]:
        """`mixer_options` reversed, for a `d_model`."""
        return {}

    @abstractmethod
    def rules(self, c: Config) -> list[Rule]:
        """The rules for the tensors, from a complete `config.json`; those with `{i}` hold for each layer."""

    def check(self, config: Config) -> None:
        """Raise `UserError` for a configuration that seqarch does not compute."""
        for key, values in self.fixed.items():
            value = config.get(key, values[0])
            if value not in values and not (isinstance(value, list) and all(each in values for each in value)):
                raise UserError(f"config.json has {key} {value!r}: seqarch computes {one_of(list(map(str, values)))}")

    def every_rule(self, config: Config, n_layers: int) -> Iterator[Rule]:
        """The rules of all layers."""
        for rule in self.rules(self.complete(config)):
            layers = range(n_layers) if "{i}" in rule.ours else range(1)
            yield from (rule.of_layer(layer) for layer in layers)

    def mixer_of(self, model: Options) -> dict[str, Any]:
        """The options of a model's only mixer, which must be the family's."""
        kinds = {str(each["class_path"]).rpartition(".")[2] for each in model["mixers"].values()}
        if kinds != {self.mixer} or len(model["mixers"]) != 1:
            raise UserError(f"its layers are {', '.join(sorted(kinds))}: this family has only {self.mixer}")
        (mixer,) = model["mixers"].values()
        return mixer["init_args"]

    def in_layers(self, names: Mapping[str, str], *endings: str, layout: Layout = "same") -> list[Rule]:
        """Rules for tensors of every layer: our names and theirs, each with these endings."""
        return [
            Rule(f"{BLOCK}{ours}{ending}", (f"{self.layer}{theirs}{ending}",), layout)
            for ours, theirs in names.items()
            for ending in endings
        ]

    def around(self, config: Config, embedding: str, norm: str, *, bias: bool = False) -> list[Rule]:
        """The rules of the embedding, the last norm and, unless it is tied, the head."""
        rules = [Rule("lm.embedding.weight", (f"{embedding}.weight",)), Rule("lm.norm.weight", (f"{norm}.weight",))]
        if bias:
            rules.append(Rule("lm.norm.bias", (f"{norm}.bias",)))
        if not config.get("tie_word_embeddings", True):
            rules.append(Rule("lm.head.weight", ("lm_head.weight",)))
        return rules


def convert(
    rules: Sequence[Rule], weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """The weights of a model here from published ones.

    Args:
        rules: for every layer.
        weights: the published tensors by name.
        shapes: of every weight here.

    Raises:
        UserError: names a tensor that is missing, unknown or of another shape.
    """
    left, converted = dict(weights), {}
    for rule in rules:
        if missing := [name for name in rule.theirs if name not in left]:
            raise UserError(f"the weights lack {missing[0]}")
        parts = [left.pop(name) for name in rule.theirs]
        with refused(f"{' + '.join(rule.theirs)} is not of the shape that the family has", IndexError, RuntimeError):
            tensor = rule.to_ours(parts)
        if tensor.shape != shapes.get(rule.ours):
            asked = [*shapes[rule.ours]] if rule.ours in shapes else "nothing"
            raise UserError(f"{' + '.join(rule.theirs)} is {[*tensor.shape]}, but config.json asks for {asked}")
        converted[rule.ours] = tensor.float()
    if left:
        raise UserError(f"the weights hold {min(left)}, which the family has not")
    return converted


def _published(tensor: Tensor, layout: Layout, *, back: bool) -> Tensor:
    if layout == "transposed" and tensor.ndim == 2:
        return tensor.T
    if layout == "depthwise":
        return tensor.unsqueeze(1) if back else tensor.flatten(1)
    if layout == "broadcast":
        return tensor[None, None] if back else tensor.flatten()
    return tensor

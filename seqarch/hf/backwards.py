"""A model of seqarch in the names of a published family that computes the same."""

import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor

from seqarch.errors import UserError
from seqarch.experiment.experiment import Experiment
from seqarch.hf.families import family
from seqarch.model import SequenceLM
from seqarch.training.weights import HEAD

DERIVED = ("n_kv_heads", "head_dim", "conv_size", "dt_rank", "hidden")
DERIVED += ("decay_rank", "rate_rank", "value_rank", "gate_rank")
"""Options whose default follows from others; a published configuration gives their value."""
IRRELEVANT = ("backend", "scaled_output", "mixers", "pattern", "no_feed_forward")
"""Options that do not change what is computed, or are compared in another way."""


def as_family(
    name: str, facts: Mapping[str, Any], weights: Mapping[str, Tensor], more: Mapping[str, Any]
) -> tuple[Any, dict[str, Tensor]]:
    """The configuration and the tensors of a published family.

    Args:
        name: its `model_type`.
        facts: of the checkpoint.
        weights: of the checkpoint.
        more: entries of `config.json` next to those of the model.

    Raises:
        UserError: there is no such family, or names an option of the model that it does not have.
    """
    target, model = family(name), _complete(facts["hyper_parameters"])
    first = (weights.get(f"lm.blocks.0.feed_forward.{name}.weight") for name in ("up", "key"))
    if (wide := next((each for each in first if each is not None), None)) is not None:
        model["feed_forward"]["init_args"]["hidden"] = wide.shape[0]
    config = {"model_type": name, **target.config(model)}
    other = _complete(target.options(config))
    if wrong := _difference(_flat(model), _flat(other)):
        raise UserError(f"{target.architecture} cannot express this model: {wrong}")
    length = facts["TextDataModule"]["sequence_length"]
    if length and name != "gpt2":
        config["max_position_embeddings"] = length
    rules = list(target.every_rule(config, model["n_layers"]))
    known = {rule.ours for rule in rules} | ({HEAD} if model["tie_embeddings"] else set())
    if odd := min(known ^ weights.keys(), default=None):
        which = "no weight" if odd in known else "the weight"
        raise UserError(f"{target.architecture} cannot express this model: it has {which} {odd}")
    theirs: dict[str, Tensor] = {}
    for rule in rules:
        theirs |= zip(rule.theirs, rule.to_theirs(weights[rule.ours]), strict=True)
    kept = {key: each.detach().cpu().clone() for key, each in theirs.items()}
    del config["model_type"]
    if target.package == "transformers":  # not AutoConfig, which gives fla's class once fla is imported
        kind = getattr(transformers, target.architecture).config_class
    else:
        kind = type("PublishedConfig", (transformers.PreTrainedConfig,), {"model_type": name})
    return kind(**config, architectures=[target.architecture], **more), kept


def _complete(model: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a model with their defaults."""
    return Experiment.from_recipe({"model": dict(model)}).config["model"]


def _flat(model: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `SequenceLM`, of the only mixer and of the feed-forward layer."""
    known = inspect.signature(SequenceLM).parameters.keys() - set(IRRELEVANT) - {"feed_forward"}
    flat = {key: model[key] for key in known}
    flat["no_feed_forward"] = bool(model["no_feed_forward"])
    (mixer,) = model["mixers"].values()
    for part, spec in (("mixer", mixer), ("feed_forward", model["feed_forward"])):
        flat[part] = spec and spec["class_path"]
        flat |= {f"{part}.{key}": value for key, value in ((spec or {}).get("init_args") or {}).items()}
    if flat.get("mixer.position") != "rope":
        flat.pop("mixer.rope_base", None)
    return flat


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first option that differs, in words."""
    for key in sorted(ours.keys() | theirs.keys()):
        option = key.rpartition(".")[2]
        if option in IRRELEVANT[:2] or (option in DERIVED and ours.get(key) in (None, "auto")):
            continue
        if ours.get(key) != theirs.get(key):
            return f"{key} is {ours.get(key)}, not {theirs.get(key)}"
    return None

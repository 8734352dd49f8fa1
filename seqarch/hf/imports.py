"""Reads a folder of Hugging Face's transformers into a run folder without training."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import seqarch
from seqarch.arguments import typed
from seqarch.data.tokenizer_files import find_tokenizer, write_tokenizer
from seqarch.data.tokenizers import Tokenizer, known_tokenizers
from seqarch.errors import UserError, absent, check_known, refused
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.load import check_model, module_of
from seqarch.hf.families import FAMILIES, family, of_mamba_ssm
from seqarch.hf.fla import of_rwkv
from seqarch.hf.model import SeqarchConfig
from seqarch.hf.rules import Rule, convert
from seqarch.model import SequenceLM
from seqarch.runs.files import atomic, check_file, check_folder, check_new, read_json
from seqarch.runs.folder import TOKENIZER, checkpoint_path, run_name, write_config, write_record
from seqarch.training.checkpoint import check_entries, check_weights, read_tensors, tokenizer_files, tokenizer_of
from seqarch.training.integrity import seal
from seqarch.training.provenance import Provenance
from seqarch.training.run_folder import describe_model, now
from seqarch.training.weights import EMBEDDING, FILES, HEAD, OtherWeights, read_safetensors, save, with_head
from seqarch.versions import commit

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
OTHER, LONE = "pytorch_model.bin", ".pth"
LENGTH = 1024
"""The longest sequences by which a model is measured unless the user says another length."""
OF_A_FILE = (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError)
"""What readers of a configuration raise for another person's file."""


@typed
def import_model(
    folder: str | Path,
    out: str | Path,
    *,
    tokenizer: str | None = None,
    eos_token: str | None = None,
    bos_token: str | None = None,
    data: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run folder without training from a published model; return it.

    `eval`, `generate`, `report`, `export` and `fit --from` take it as any run folder. Nothing is written unless every
    tensor of the folder has its place.

    Args:
        folder: with `config.json`, safetensors files or `pytorch_model.bin`, and the tokenizer's files; or one that
            `seqarch export` wrote; or a .pth file of RWKV-7's authors.
        out: the run folder, new.
        tokenizer: as of `seqarch data prepare`; by default the one in the folder.
        eos_token: token that ends a document, where the tokenizer does not say it.
        bos_token: token that begins it; "" for none.
        data: options of `TextDataModule`: text that tasks measure, prepared with this tokenizer. A `sequence_length` of
            `None` is the model's own, at most 1,024.

    Raises:
        UserError: names a tensor, a shape or an option that seqarch does not compute, or a file that is missing.
    """
    folder, out = Path(folder), Path(out)
    lone = _is_lone(folder, tokenizer)
    check_new(out, "folder")
    check_folder(folder.parent if lone else folder, written=False)
    with refused(f"{folder / CONFIG} cannot be read as a model", *OF_A_FILE, why=_lacking):
        config, weights = of_rwkv(_file(folder)) if lone else (_config(folder), _weights(folder))
        if config.get("model_type") == SeqarchConfig.model_type:
            content, own = _of_seqarch(config, weights, folder)
        else:
            content, own = _of_family(config, weights, folder), None
        if not (isinstance(length := content["TextDataModule"]["sequence_length"], int) and 0 < length < 2**31):
            raise UserError(f"{folder / CONFIG} has sequence_length {length!r}: restore the number of tokens")
    if tokenizer is not None or own is None:
        own = find_tokenizer(str(folder) if tokenizer is None else tokenizer, eos_token, bos_token)
    elif (eos_token, bos_token) != (None, None):
        raise UserError(f"{folder} says which tokens are around documents: leave eos_token and bos_token out")
    content["seqarch"] = {**content["seqarch"], "tokenizer": own.name, **tokenizer_files(own)}
    _write(out, content, own, dict(data or {}), str(config.get("model_type")))
    return out


def _lacking(error: Exception) -> object:
    """What is wrong in a configuration whose reader raised this."""
    if isinstance(error, KeyError):
        return f"it lacks {error.args[0]}"
    return "a size in it is 0" if isinstance(error, ZeroDivisionError) else error


def _is_lone(place: Path, tokenizer: str | None) -> bool:
    """Whether the weights are one file without a configuration and a tokenizer, and not a folder."""
    lone = place.suffix == LONE and place.is_file()
    if not lone and not place.is_dir():
        raise absent("folder", place, f"name one with {CONFIG} and the weights, or a {LONE} file")
    if lone and tokenizer is None:
        raise UserError(f"{place} comes without a tokenizer: name one with --tokenizer")
    return lone


def _config(folder: Path) -> dict[str, Any]:
    check_file(folder / CONFIG)
    config = read_json(folder / CONFIG)
    return of_mamba_ssm(config) if "ssm_cfg" in config and "model_type" not in config else config


def _weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder. Names of files in an index stay within it, links of the Hub's cache among them."""
    names = ["model.safetensors"]
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(each, str) for each in listed.values()):
            raise UserError(f"{folder / INDEX} is damaged: its weight_map is not a mapping of names")
        names = sorted({*listed.values()})
    weights: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        home, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
        cache = home.parent.parent / "blobs"
        if Path(name).name != name or (not real.is_relative_to(home) and real.parent != cache):
            raise UserError(f"{name[:200]} leads out of the folder {folder}: weights lie in it")
        if path.is_file():
            weights |= read_safetensors(path)[1]
        elif len(names) == 1 and (folder / OTHER).is_file():
            weights = _file(folder / OTHER)
        else:
            raise absent("file", path)
    return weights


def _file(path: Path) -> dict[str, Tensor]:
    weights = read_tensors(path)
    check_weights(weights, path)
    return weights


def _of_seqarch(
    config: Mapping[str, Any], weights: dict[str, Tensor], folder: Path
) -> tuple[dict[str, Any], Tokenizer | None]:
    """The checkpoint in a folder of `seqarch export`, or of `save_pretrained` after it, and its tokenizer if known."""
    files = {name.removeprefix(FILES): weights.pop(name) for name in list(weights) if name.startswith(FILES)}
    content = {**(config.get("seqarch") or {}), "state_dict": with_head(weights)}
    check_entries(content, folder / CONFIG)
    for ours, theirs in (("vocab_size", "vocab_size"), ("tie_embeddings", "tie_word_embeddings")):
        content["hyper_parameters"][ours] = config.get(theirs, content["hyper_parameters"].get(ours))
    name = content["seqarch"]["tokenizer"]
    if files:
        return content, tokenizer_of({"seqarch": {"tokenizer": name, "tokenizer_files": files}})
    return content, find_tokenizer(name) if name in known_tokenizers() else None


def _of_family(config: Mapping[str, Any], weights: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    """A checkpoint with the weights of a published model."""
    kind = str(config.get("model_type"))
    check_known("model_type in config.json", kind, [*FAMILIES, SeqarchConfig.model_type])
    target = family(kind)
    config = {**target.declared(), **config}
    target.check(config)
    options = target.options(config)
    length = config.get("max_position_embeddings") or config.get("n_positions") or 2048
    content = {
        "seqarch": {"version": seqarch.__version__, "precision": "32-true", "tokenizer": "", "source": folder.name},
        "hyper_parameters": Experiment.from_recipe({"model": options}).config["model"],
        "global_step": 0,
        "TextDataModule": {"sequence_length": length},
    }
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in module_of(content).state_dict().items()}
    rules = list(target.every_rule(config, options["n_layers"]))  # as many as the model, which is built, has layers
    weights = {name: each for name, each in weights.items() if not name.endswith(target.dropped or (" ",))}
    if target.prefix and not any(name.startswith(target.prefix) for name in weights):
        weights = {target.prefix + name: each for name, each in weights.items()}
    weights = {name.replace("backbone.embedding.", "backbone.embeddings."): each for name, each in weights.items()}
    if content["hyper_parameters"]["tie_embeddings"] and "lm_head.weight" in weights:
        rules.append(Rule(HEAD, ("lm_head.weight",)))
    return {**content, "state_dict": with_head(convert(rules, weights, shapes))}


def _write(out: Path, content: dict[str, Any], tokenizer: Tokenizer, data: dict[str, Any], source: str) -> None:
    """Write the run folder, once the model has taken all weights."""
    module = module_of(content)
    with refused("the weights are those of another model", OtherWeights, why=True):
        module.load_state_dict(content["state_dict"])
    lm = module.built()
    with refused("the model cannot be imported", UserError, why=True):
        check_model(lm, tokenizer)
        embedding, head = (content["state_dict"][name].float() for name in (EMBEDDING, HEAD))
        if lm.head.weight is lm.embedding.weight and not torch.equal(embedding, head):
            raise UserError("its head differs from its embedding, but config.json ties them")
    if data:
        data = {"document_mask": bool(content["TextDataModule"].get("document_mask")), **data}
    if data.get("sequence_length", 0) is None:
        data["sequence_length"] = min(LENGTH, content["TextDataModule"]["sequence_length"])
    recipe = {"run_dir": str(out), "model": content["hyper_parameters"], **({"data": data} if data else {})}
    experiment = Experiment.from_recipe(recipe)
    if data:  # on which tasks can measure the model
        experiment.data.prepare_data()
        experiment.data.setup("validate")
        Provenance(tokenizer.name).check_tokenizer(experiment.data, "the model")
    config = experiment.config
    path = checkpoint_path(out, content["global_step"])
    with atomic(path, durable=True) as partial:
        save(partial, {**content, "hyper_parameters": config["model"]})
        seal(partial)
    if not data:
        config.pop("data")
    write_config(out, config)
    write_tokenizer(tokenizer, out / TOKENIZER)
    record = {"name": run_name(out.resolve()), "imported": source, "tokenizer": tokenizer.name}
    write_record(out, record | _record(lm, content))


def _record(lm: SequenceLM, content: Mapping[str, Any]) -> dict[str, Any]:
    """What `run.json` says of a model that was not trained here."""
    return {
        "status": "finished",
        **describe_model(lm, content["TextDataModule"]["sequence_length"]),
        "seed": 0,
        "max_steps": content["global_step"],
        "commit": commit(),
        **dict.fromkeys(("started", "finished"), now()),
    }

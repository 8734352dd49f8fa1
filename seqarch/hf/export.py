"""Writes a trained model as a folder that Hugging Face's transformers loads, also in a published family's names."""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor
from transformers import GenerationConfig

from seqarch.arguments import typed
from seqarch.errors import UserError, refused, several
from seqarch.experiment.load import complete_model, load_content
from seqarch.hf.families import family
from seqarch.hf.model import SeqarchConfig, SeqarchForCausalLM
from seqarch.hf.tokenizer import as_hugging_face
from seqarch.hf.world import CODE, RWKVWorldTokenizer
from seqarch.model import SequenceLM
from seqarch.report.runs import FILES, Run, load_run
from seqarch.runs import tags
from seqarch.runs.files import check_new, replaced
from seqarch.runs.folder import named_checkpoint, run_name, run_of
from seqarch.tables import markdown
from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.weights import HEAD, facts_of, write_content, write_tensors

LINE = "from seqarch.hf import RWKVWorldTokenizer, SeqarchConfig, SeqarchForCausalLM\n"
CARD, FILE = "README.md", "model.safetensors"
LOADED = """import seqarch.hf  # without it, set trust_remote_code=True
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
"""


@typed
def export(
    checkpoint: str | Path, out: str | Path, allow_code: str | Collection[str] = (), *, family: str | None = None
) -> Path:
    """Write the model of a checkpoint, its tokenizer and a model card into a folder; return the folder.

    `transformers.AutoModelForCausalLM.from_pretrained(out)` reads it after `import seqarch.hf`, or with
    `trust_remote_code=True`.

    Args:
        checkpoint: the file; of a run folder the newest.
        out: the folder, new.
        allow_code: packages whose classes the checkpoint may name, next to those of seqarch and plug-ins.
        family: `model_type` of a published family that computes the same, such as "llama": the folder is then in its
            own names, which every tool reads.

    Raises:
        UserError: the file is not a checkpoint, its model cannot be built here, `out` is a file or holds files, or
            the family cannot express the model.
    """
    path, out = named_checkpoint(checkpoint), Path(out)
    check_new(out, "folder")
    content = read_checkpoint(path)
    lm, tokenizer = load_content(content, path, several(allow_code))
    facts = facts_of(content)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_id)
    length = facts["TextDataModule"]["sequence_length"] or SeqarchConfig.max_position_embeddings
    theirs = as_hugging_face(tokenizer, length, document_mask=lm.document_mask)
    if family is not None and isinstance(theirs, RWKVWorldTokenizer):
        raise UserError(f"only seqarch.hf reads the tokenizer '{tokenizer.name}': export without a family")
    config, weights = _for_transformers(content, special, family)
    decodes = all("decode" in block.mixer.capabilities for block in lm.blocks if block.mixer is not None)  # pyright: ignore
    with replaced(out) as new:
        if weights is None:
            write_content(new / FILE, content)
            (new / f"{CODE}.py").write_text(LINE)
        else:
            write_tensors(new / FILE, weights)
        config.save_pretrained(new)
        GenerationConfig(**special, use_cache=decodes).save_pretrained(new)
        theirs.save_pretrained(new)
        (new / CARD).write_text(card(run_of(path), facts, lm.n_parameters()), encoding="utf-8")
    return out


def _for_transformers(content: Mapping[str, Any], special: Mapping[Any, int], family: str | None) -> tuple[Any, Any]:
    """The configuration, and a published family's weights by its names if one is asked for."""
    facts, state = facts_of(content), content["state_dict"]
    options = {"dtype": next(iter(state.values())).dtype, **special}
    if family is not None:
        return as_family(family, facts, state, options)
    config, model = SeqarchConfig.__name__, SeqarchForCausalLM.__name__
    auto_map = {"AutoConfig": f"{CODE}.{config}", "AutoModelForCausalLM": f"{CODE}.{model}"}
    return SeqarchConfig.of(facts, architectures=[model], auto_map=auto_map, **options), None


def card(run: Path, facts: Mapping[str, Any], n_parameters: int) -> str:
    """The model card: what was trained, on what, its losses by domain, its recipe, and how to load it."""
    read = load_run(run) if all((run / name).is_file() for name in FILES) else None
    record = read.facts if read else {}
    domains = (f"{domain} {share:g}" for domain, share in (record.get("train") or {}).items())
    about = {
        "parameters": f"{n_parameters:,}",
        "steps": f"{facts['global_step']:,}",
        "tokens": f"{read.tokens:,}" if read else "",
        "sequence length": f"{facts['TextDataModule']['sequence_length'] or ''}",
        "tokenizer": facts["seqarch"]["tokenizer"],
        "training domains": ", ".join(domains),
        "training files": ", ".join(map(str, facts["seqarch"].get("sources", {}).values())),
        "seqarch": f"{facts['seqarch'].get('version', '')}, commit {record.get('commit') or 'unknown'}",
    }
    losses = _losses(read, facts["global_step"]) if read else []
    model = yaml.safe_dump({"model": facts["hyper_parameters"]}, sort_keys=False)
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [seqarch]\n---",
        f"# {run_name(run.resolve())}",
        "A language model trained with seqarch.",
        "\n".join(markdown([["what", "value"], *([what, value] for what, value in about.items() if value)])),
        f"```python\n{LOADED}```",
        "The tokenizer begins each text as a document began in training.",
    ]
    if losses:
        head = ["domain", "role", "loss in nats per token"]
        parts += ["## Losses", "\n".join(markdown([head, *losses]))]
    return "\n\n".join([*parts, "## Recipe", f"```yaml\n{model}```"]) + "\n"


def _losses(run: Run, step: int) -> list[list[str]]:
    """Domain, role and the last loss up to a step, of each domain that the run measured."""
    rows = []
    for role in (tags.IN_DOMAIN, tags.OOD):
        for domain in tags.domains(run.curves, role):
            curve = run.curves[tags.loss(role, domain)]
            rows += [[domain, role.replace("_", "-"), f"{value:.3f}"] for value in curve.value[curve.step <= step][-1:]]
    return rows


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
    target, model = family(name), complete_model(facts["hyper_parameters"])
    first = (weights.get(f"lm.blocks.0.feed_forward.{name}.weight") for name in ("up", "key"))
    if (wide := next((each for each in first if each is not None), None)) is not None:
        model["feed_forward"]["init_args"]["hidden"] = wide.shape[0]
    config = {"model_type": name, **target.config(model)}
    other = complete_model(target.options(config))
    with refused(f"{target.architecture} cannot express this model", UserError, why=True):
        target.check(config)
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
    return target.config_class()(**config, architectures=[target.architecture], **more), kept


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

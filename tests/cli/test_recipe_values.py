"""Recipes train the models of arXiv 2505.18522 (table of configurations) and the exam's sizes as its page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seqarch.exam.derive import find_model, load_size
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.recipes import merged_recipe
from seqarch.model import SequenceLM

RECIPES = Path(__file__).parents[2] / "recipes"
DOMAINS = ["arxiv", "github", "stack", "wiki", "speech"]


def mixer_of(recipe: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    (mixer,) = recipe["model"]["mixers"].values()
    return mixer["class_path"], mixer["init_args"]


@pytest.mark.parametrize(
    ("name", "layers", "mixer", "options"),
    [
        ("transformer", 12, "Attention", {"n_heads": 12, "position": "none", "bias": True}),
        ("transformer_pp", 12, "Attention", {"n_heads": 12}),
        ("window_256", 12, "Attention", {"n_heads": 12, "window": 256}),
        ("top1_element", 12, "Top1Element", {"n_heads": 12}),
        ("top1_chunk", 12, "Top1Chunk", {"n_heads": 12, "chunk_size": 128, "selection": "exact"}),
        ("top1_chunk_approx", 12, "Top1Chunk", {"n_heads": 12, "chunk_size": 128, "selection": "approx"}),
        ("based", 15, "Based", {"n_heads": 12, "window": 128}),
        ("mamba1", 24, "Mamba1", {"d_state": 16}),
        ("mamba2", 24, "Mamba2", {"d_state": 128}),
        ("rwkv5", 12, "RWKV5", {"n_heads": 12}),
        ("rwkv6", 12, "RWKV6", {"n_heads": 12}),
        ("rwkv7", 12, "RWKV7", {"n_heads": 12}),
        ("delta_net", 12, "DeltaNet", {"n_heads": 8}),
        ("gated_delta_net", 12, "GatedDeltaNet", {"n_heads": 6, "head_dim": 96}),
    ],
)
def test_architectures_of_110m(name: str, layers: int, mixer: str, options: dict[str, Any]):
    recipe = merged_recipe(RECIPES / f"{name}_110m.yaml")
    model = recipe["model"]
    assert (model["d_model"], model["n_layers"], model["vocab_size"]) == (768, layers, 32_000)
    assert mixer_of(recipe) == (mixer, options)
    assert model["tie_embeddings"]
    larger = RECIPES / f"{name}_1b.yaml"
    if larger.is_file():
        other = merged_recipe(larger)
        assert (other["model"]["d_model"], other["model"]["n_layers"]) == (2048, 2 * layers)
        assert mixer_of(other) == (mixer, {**options, **({"n_heads": 16} if "n_heads" in options else {})})


@pytest.mark.parametrize("base", ["110m", "1b", "rwkv7_shell_100k"])
def test_precision_and_text(base: str):
    recipe = merged_recipe(RECIPES / f"base/{base}.yaml")
    assert recipe["trainer"]["precision"] == "bf16-mixed"
    assert list(recipe["data"]["train"]) == ["cc", "c4"]
    ood = ["arxiv", "github", "automathtext" if base.endswith("100k") else "stack"]
    assert recipe["data"]["ood"] == ood


@pytest.mark.parametrize(
    ("core", "options"),
    [
        ("softmax", {}),
        ("window_256", {"window": 256}),
        ("top1_chunk", {"chunk_size": 128, "selection": "exact"}),
        ("top1_chunk_approx", {"chunk_size": 128, "selection": "approx"}),
    ],
)
def test_shells_of_100k_tokens(core: str, options: dict[str, Any]):
    name = f"rwkv7_shell_{core}_100k"
    recipe = merged_recipe(RECIPES / f"{name}.yaml")
    shell, given = mixer_of(recipe)
    part = given["core"] if isinstance(given["core"], dict) else {"class_path": given["core"]}
    assert (shell, given["n_heads"], given.get("qk_norm", False)) == ("RWKV7Shell", 12, "top1" in core)
    assert part["class_path"] == ("Top1ChunkCore" if "top1" in core else "SoftmaxCore")
    assert part.get("init_args", {}) == options
    assert not recipe["model"]["tie_embeddings"]
    model = Experiment.from_recipe(RECIPES / f"{name}.yaml").build_on_meta()
    assert isinstance(model, SequenceLM)
    assert {each.rope_base for each in model.modules() if hasattr(each, "rope_base")} == {1_000_000.0}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((f"mamba1_decay_{decay}", {"decay": decay}) for decay in ("one", "none")),
        *((f"mamba2_decay_{decay}", {"d_state": 128, "decay": decay}) for decay in ("one", "none")),
        ("mamba1_decay_none_no_conv", {"decay": "none", "conv": False}),
        ("mamba2_decay_none_no_conv", {"d_state": 128, "decay": "none", "conv": False}),
        ("mamba2_no_norm", {"d_state": 128, "norm": False}),
        *((f"window_{keys}", {"n_heads": 12, "window": keys}) for keys in (16, 64, 1024)),
        *(
            (f"temperature_{each}", {"n_heads": 12, "qk_norm": True, "temperature": each})
            for each in (0.0625, 0.125, 0.25, 0.5, 1.0)
        ),
        *(
            (name, {"n_heads": 12, "relation": name, "position": "none", "max_length": 2048})
            for name in ("constant_keys", "constant_queries_keys")
        ),
        *((f"position_{each}", {"n_heads": 12, "position": each}) for each in ("none", "alibi")),
        ("position_absolute", {"n_heads": 12, "position": "none"}),
    ],
)
def test_ablations(name: str, options: dict[str, Any]):
    recipe = merged_recipe(RECIPES / f"ablations/{name}.yaml")
    assert mixer_of(recipe)[1] == options
    assert recipe["model"].get("learned_positions", 0) == (2048 if name == "position_absolute" else 0)
    if name.startswith("temperature"):
        tokens = recipe["trainer"]["max_steps"] * recipe["data"]["sequences_per_step"] * 2048
        assert tokens == pytest.approx(25e9, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "rate", "warmup", "sequences", "length", "evaluated", "domains"),
    [
        ("draft", 1.5e-3, 150, 64, 1024, 262_144, DOMAINS[:3]),
        ("small", 1.5e-3, 150, 64, 1024, 393_216, DOMAINS),
        ("medium", 1.0e-3, 250, 128, 2048, 524_288, DOMAINS),
        ("long", 1.5e-3, 40, 2, 102_400, 819_200, DOMAINS[:2]),
        ("tiny", 4.0e-3, 48, 8, 256, 8_192, ["cloud", "python", "cpp", "names"]),
    ],
)
def test_sizes_of_the_exam(name, rate, warmup, sequences, length, evaluated, domains):
    config = merged_recipe(RECIPES / f"exam/{name}.yaml")
    model, data = config["model"], config["data"]
    assert (float(model["learning_rate"]), model["warmup_steps"]) == (rate, warmup)
    trained = Experiment.from_recipe(RECIPES / f"exam/{name}.yaml").config
    assert (list(trained["model"]["betas"]), trained["model"]["weight_decay"]) == ([0.9, 0.95], 0.1)
    assert trained["trainer"]["gradient_clip_val"] == 1.0
    assert (data["sequences_per_step"], data["sequence_length"], data["eval_tokens"]) == (sequences, length, evaluated)
    assert data["ood"] == domains
    steps = {"draft": 1730, "small": 5190, "medium": 4000, "long": 240}  # 113M, 340M, 1.05B and 49M tokens
    steps |= {"tiny": 480}  # 1.0M bytes
    assert config["trainer"]["max_steps"] == steps[name]
    assert data.get("eval_documents", 1) == (256 if name in ("small", "medium") else 1)
    assert evaluated // length >= 256 or name in ("tiny", "long")
    assert config["ood_loss"]["keep_sequences"]
    assert config["ood_loss"]["tasks"] == ["Copying"]
    settles = name in ("small", "medium")
    assert (model["decay_share"], config["branches"]["at"]) == (0.2, [0.125, 0.25, 0.5] if settles else [0.5])
    assert len(config["ood_loss"]["at"]) == {"draft": 24, "tiny": 12, "long": 4}.get(name, 8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qk_norm", {"qk_norm": True}),
        *((f"window_{keys}", {"window": keys}) for keys in (16, 64, 256)),
        *((f"top1_chunk_{size}", {"chunk_size": size, "selection": "exact"}) for size in (16, 32, 128)),
        *((f"top1_chunk_{n}_remote", {"chunk_size": 64, "selection": "exact", "remote_chunks": n}) for n in (2, 4)),
        ("biases", {"bias": True}),
        ("qk_norm_sharp", {"qk_norm": True, "temperature": 0.0625}),
        ("residual_fp32", {}),
        ("unscaled_outputs", {"scaled_output": False}),
        ("top1_chunk_approx_32", {"chunk_size": 32, "selection": "approx"}),
        ("top1_chunk_approx_32_conv", {"chunk_size": 32, "selection": "approx", "key_conv": 3}),
        ("top1_chunk_approx_conv", {"chunk_size": 64, "selection": "approx", "key_conv": 3}),
    ],
)
def test_models_of_the_study(name: str, options: dict[str, Any]):
    recipe = merged_recipe(RECIPES / f"study/{name}.yaml")
    assert mixer_of(recipe)[1] == {"n_heads": 8, **options}
    assert recipe["trainer"]["max_steps"] == 5190
    unscaled = {"class_path": "GeGLU", "init_args": {"scaled_output": False}}
    assert recipe["model"]["feed_forward"] == (unscaled if name == "unscaled_outputs" else "GeGLU")
    assert recipe["model"].get("residual_in_fp32", False) == (name == "residual_fp32")


@pytest.mark.parametrize("core", ["mamba2", "gated_delta_net"])
def test_shells_of_recurrences_hold_the_layers_of_the_exam(core: str):
    size = load_size("small", {})
    given = mixer_of(merged_recipe(RECIPES / f"study/rwkv7_shell_{core}.yaml"))[1]
    layer = mixer_of(find_model(size, core, {})[1])
    assert given == {"n_heads": 8, "core": {"class_path": layer[0], "init_args": layer[1]}}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *((name, {}) for name in ("transformer_pp", "top1_chunk", "rwkv7")),
        *((name, {"conv": False}) for name in ("mamba2", "gated_delta_net", "delta_net")),
    ],
)
def test_canon_is_all_that_a_recipe_adds_to_the_model_of_the_exam(name: str, changed: dict[str, Any]):
    model = merged_recipe(RECIPES / f"study/canon_{name}.yaml")["model"]
    expected = find_model(load_size("small", {}), name, {})[1]["model"]
    mixer_of({"model": expected})[1].update(changed)
    places = {"mamba2": "AB", "rwkv7": "AC"}
    canon = {"class_path": "Canon", "init_args": {"places": places[name]}} if name in places else "Canon"
    assert {"norm": "rmsnorm", **model} == {**expected, "canon": canon}


TRAINING = ("learning_rate", "warmup_steps", "betas", "weight_decay", "decay_share")
BASES = {"_110m": "base/110m", "_1b": "base/1b", "_100k": "base/rwkv7_shell_100k"}
OF_BASE = {path: base for ending, base in BASES.items() for path in sorted(RECIPES.glob(f"*{ending}.yaml"))}
OF_BASE |= {
    path: "base/1b" if path.stem.endswith("_1b") else "base/110m" for path in sorted(RECIPES.glob("ablations/*.yaml"))
}
OF_BASE |= dict.fromkeys(sorted(RECIPES.glob("study/*.yaml")), "exam/small")


@pytest.mark.parametrize("path", OF_BASE, ids=lambda path: path.stem)
def test_all_models_of_a_size_train_in_one_way(path: Path):
    """Rate, warm-up, betas, decay, clipping and batch are those of the size, so that only the model differs."""

    def settings(recipe: dict[str, Any]) -> dict[str, Any]:
        options = {key: recipe["model"].get(key) for key in TRAINING}
        options |= {key: recipe["data"][key] for key in ("sequences_per_step", "sequence_length")}
        return options | {"clip": recipe["trainer"].get("gradient_clip_val")}

    assert settings(merged_recipe(path)) == settings(merged_recipe(RECIPES / f"{OF_BASE[path]}.yaml"))

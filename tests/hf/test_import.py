"""Published families, made by transformers with random weights: equal logits here, and back in their own names."""

import json
import math
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import seqarch
from seqarch import cli
from seqarch.data.prepare import prepare
from seqarch.errors import UserError
from seqarch.experiment.evaluate import evaluate_checkpoint
from seqarch.hf.export import export
from seqarch.hf.imports import import_model
from seqarch.report import compare
from seqarch.runs.folder import read_config, read_record, write_record
from seqarch.runs.results import newest_results
from tests.conftest import TINY, flags
from tests.data.test_tokenizer_files import files  # noqa: F401 - a fixture
from tests.hf.test_model import MIXERS, OPTIONS
from tests.training.test_optimizers import curves, interrupted

LLAMA = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300, "layer_norm_epsilon": 1e-5}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 64}),
    "llama-2": ("Llama", {**LLAMA, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}),
    "llama-3.2-1b": ("Llama", {**LLAMA, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    "llama, biases": ("Llama", {**LLAMA, "attention_bias": True, "head_dim": 16}),
    "linear": ("Llama", {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 16}),
    "qwen2-0.5b": ("Qwen2", {**LLAMA, "rms_norm_eps": 1e-6,
                             "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "qwen3, biases": ("Qwen3", {**LLAMA, "head_dim": 16, "rms_norm_eps": 1e-6, "attention_bias": True}),
    "qwen3-0.6b": ("Qwen3", {**LLAMA, "head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    "mamba-130m": ("Mamba", {**MAMBA, "state_size": 16, "expand": 2, "conv_kernel": 4, "tie_word_embeddings": True}),
    "mamba2-130m": ("Mamba2", {**MAMBA, "state_size": 32, "expand": 2, "head_dim": 16, "num_heads": 8, "n_groups": 1,
                               "tie_word_embeddings": True}),
}  # fmt: skip
"""Class and configuration: the ratios, epsilons, scaling and tying of published sizes at a smaller width."""


def published(name, folder, **changed) -> Any:
    """A model of transformers with random weights that all matter, in a folder."""
    kind, options = PUBLISHED[name]
    config = getattr(transformers, f"{kind}Config")(**{**options, **changed})
    # not AutoModelForCausalLM, which gives fla's class once fla is imported
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])(config)
    for key, weight in model.named_parameters():
        if key.endswith(("A_log", "dt_bias", "dt_proj.bias")):
            continue
        weight.data.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_logits_are_those_of_transformers_and_export_gives_its_tensors_back(name, tmp_path):
    theirs = published(name, tmp_path / "published")
    run = import_model(tmp_path / "published", tmp_path / "run", tokenizer="byte")
    lm, _ = seqarch.load(run)
    tokens = torch.randint(0, 300, (2, 50))
    torch.testing.assert_close(lm.cpu()(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
    cli.run(["export", str(run), "--out", str(tmp_path / "back"), "--as", theirs.config.model_type])
    back = type(theirs).from_pretrained(tmp_path / "back").eval()
    assert back.config.architectures == [type(theirs).__name__]
    assert torch.equal(back(tokens).logits, theirs(tokens).logits)


def changed(folder, **config):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in PUBLISHED),
        ("mistral", {"sliding_window": 4096}),
        ("mamba2-130m", {"tie_word_embeddings": False}),
    ],
)
def test_a_configuration_without_defaults_means_the_same(name, options, tmp_path):
    theirs = published(name, tmp_path / "published", **options)
    path, defaults = tmp_path / "published/config.json", type(theirs.config)().to_dict()
    whole = json.loads(path.read_text())
    short = {key: value for key, value in whole.items() if key == "model_type" or value != defaults.get(key)}
    models = []
    for config in (whole, short):
        path.write_text(json.dumps(config))
        run = import_model(tmp_path / "published", tmp_path / f"run-{len(config)}", tokenizer="byte")
        models.append(read_config(run)["model"])
    assert models[0] == models[1]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_scaling": {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
)
@torch.no_grad()
def test_old_and_new_names_of_positions_mean_what_they_mean_in_transformers(rope, tmp_path):
    kind = type(published("llama-2", tmp_path / "published"))
    changed(tmp_path / "published", **{"rope_parameters": None, **rope})
    lm, _ = seqarch.load(import_model(tmp_path / "published", tmp_path / "run", tokenizer="byte"))
    tokens, theirs = torch.randint(0, 300, (2, 50)), kind.from_pretrained(tmp_path / "published").eval()
    torch.testing.assert_close(lm.cpu()(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function 'relu': seqarch computes gelu_new"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ("llama-2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ("llama-2", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama-2", {"max_position_embeddings": "x"}, "has sequence_length 'x'"),
        ("llama-2", {"max_position_embeddings": 2**64}, "has sequence_length 18446"),
        ("llama-2", {"intermediate_size": 64}, r"up_proj|gate_proj"),
        ("mamba2-130m", {"n_groups": 2}, "n_groups 2"),
        ("mamba2-130m", {"num_heads": 4}, "num_heads 4"),
        ("mistral", {"attention_bias": True}, "attention_bias True"),
        ("mamba-130m", {"use_bias": True}, "use_bias True"),
        ("qwen2-0.5b", {"model_type": "qwen9"}, "unknown model_type in config.json 'qwen9'"),
    ],
)
def test_what_seqarch_does_not_compute_is_refused_by_name(name, config, said, tmp_path):
    published(name, tmp_path / "published")
    changed(tmp_path / "published", **config)
    with pytest.raises(UserError, match=said):
        import_model(tmp_path / "published", tmp_path / "run", tokenizer="byte")
    assert not (tmp_path / "run").exists(), "nothing is half loaded"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": "wide"}, "unsupported operand type"),
        ({"num_attention_heads": 0}, "a size in it is 0"),
        ({"rope_theta": None}, "not 'NoneType'"),
        ({"rope_scaling": {"type": "linear"}}, "it lacks factor"),
        ({"model_type": "seqarch", "seqarch": "abc"}, "'str' object is not a mapping"),
    ],
)
def test_a_damaged_configuration_is_refused(config, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA, "rms_norm_eps": 1e-5, **config}))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"config\.json cannot be read as a model: .*{said}"):
        import_model(tmp_path, tmp_path / "run", tokenizer="byte")


def test_no_list_is_made_for_a_billion_layers(tmp_path):
    config = {"model_type": "llama", **LLAMA, "rms_norm_eps": 1e-5, "num_hidden_layers": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"n_layers .*must be at most 10,000"):
        import_model(tmp_path, tmp_path / "run", tokenizer="byte")


@pytest.mark.parametrize("weights", [[1, 2], {1: torch.zeros(2)}, {"model.norm.weight": 3}])
def test_a_file_without_tensors_by_name_is_refused(weights, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA, "rms_norm_eps": 1e-5}))
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin (does not hold tensors|is not a checkpoint)"):
        import_model(tmp_path, tmp_path / "run", tokenizer="byte")


def test_unknown_missing_and_misshaped_tensors_are_named(tmp_path):
    published("llama-2", tmp_path / "published")
    file = tmp_path / "published/model.safetensors"
    weights = load_file(file)
    norm, query = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
    for wrong, said in (
        ({**weights, "model.layers.0.self_attn.sinks": torch.zeros(8)}, r"hold model\.layers\.0\.self_attn\.sinks"),
        ({name: each for name, each in weights.items() if name != norm}, rf"lack {norm}"),
        ({**weights, norm: torch.zeros(3)}, rf"{norm} is \[3\]"),
        ({**weights, query: torch.tensor(1.0)}, rf"^{query} .* is not of the shape that the family has$"),
        ({**weights, norm: weights[norm] * math.nan}, "its weight blocks.1.mixer_norm.weight is not finite"),
        (None, "there is no file"),
    ):
        if wrong is None:
            file.unlink()
            file.symlink_to(file.name)
        else:
            save_file(wrong, file)
        with pytest.raises(UserError, match=said):
            import_model(tmp_path / "published", tmp_path / "run", tokenizer="byte")
    assert not (tmp_path / "run").exists()


@torch.no_grad()
def test_the_names_of_mamba_ssm_are_read(tmp_path):
    theirs = published("mamba2-130m", tmp_path / "published")
    file = tmp_path / "published/model.safetensors"
    names = {name: name.replace("embeddings", "embedding") for name in load_file(file)}
    weights = {names[name]: each for name, each in load_file(file).items()}
    weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    file.unlink()
    torch.save(weights, tmp_path / "published/pytorch_model.bin")
    config = {"d_model": 64, "n_layer": 2, "vocab_size": 293, "pad_vocab_size_multiple": 20, "rms_norm": True,
              "ssm_cfg": {"layer": "Mamba2", "d_state": 32, "headdim": 16}, "residual_in_fp32": True}  # fmt: skip
    (tmp_path / "published/config.json").write_text(json.dumps(config))
    lm, _ = seqarch.load(import_model(tmp_path / "published", tmp_path / "run", tokenizer="byte"))
    tokens = torch.randint(0, 300, (2, 50))
    torch.testing.assert_close(lm.cpu()(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["hybrid", "RWKV7"])
@torch.no_grad()
def test_an_exported_folder_comes_back_bit_for_bit(name, exported, tmp_path):
    lm, _, folder = exported(MIXERS[name], **OPTIONS.get(name, {}))
    cli.run(["import", str(folder), "--out", str(tmp_path / "run")])
    again, tokenizer = seqarch.load(tmp_path / "run")
    tokens = torch.randint(0, 257, (2, 20))
    assert torch.equal(again.cpu()(tokens), lm(tokens))
    assert tokenizer.name == "byte"
    with pytest.raises(UserError, match=r"Copying reads .*/run/.*ckpt is in no run with data"):
        evaluate_checkpoint(tmp_path / "run", "Copying")


@pytest.mark.parametrize("name", ["Attention", "llama-2"])
def test_a_head_of_its_own_is_refused_where_the_configuration_ties_it(name, exported, tmp_path):
    folder = tmp_path / "exported"
    exported(MIXERS[name], tie_embeddings=False) if name in MIXERS else published(name, folder)
    changed(folder, tie_word_embeddings=True)
    with pytest.raises(UserError, match="its head differs from its embedding"):
        import_model(folder, tmp_path / "run", tokenizer="byte")
    assert not (tmp_path / "run").exists()


def test_a_damaged_exported_folder_leaves_no_run(exported, tmp_path):
    folder = exported(MIXERS["Attention"]).folder
    facts = json.loads((folder / "config.json").read_text())["seqarch"]
    for data, said in (({}, "lacks sequence_length"), ({"sequence_length": "x"}, "has sequence_length 'x'")):
        changed(folder, seqarch={**facts, "TextDataModule": data})
        with pytest.raises(UserError, match=said):
            import_model(folder, tmp_path / "run")
    changed(folder, seqarch=facts)
    weights = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in weights.items() if name != "lm.norm.weight"}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"those of another model: Missing key\(s\) in state_dict: \"lm\.norm\.weight"):
        import_model(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.commands
def test_an_imported_run_is_measured_on_data(exported, shards, tmp_path):
    folder, run = exported(MIXERS["Attention"]).folder, str(tmp_path / "run")
    options = ["--data", str(shards), "--train", "docs", "--ood", "code", "--sequence_length", "512"]
    cli.run(["import", str(folder), "--out", run, *options])
    with pytest.raises(UserError, match="was imported and has no curves: seqarch eval measures it"):
        compare([run])
    cli.run(["eval", "--checkpoint", run, "--tasks", "LossByDomain", "BitsPerByte"])
    metrics = newest_results(tmp_path / "run")["LossByDomain"].metrics
    assert {"loss/in_domain/docs", "loss/ood/code"} <= {*metrics}
    bits = newest_results(tmp_path / "run")["BitsPerByte"].metrics["bits_per_byte/ood/code"].value
    again = shutil.copytree(run, tmp_path / "again")
    write_record(again, {**read_record(again), "name": "again"})
    rows = [line.split() for line in str(compare([run, again])).splitlines()]
    assert ["bits_per_byte/ood/code", f"{bits:.4g}", f"{bits:.4g}"] in rows
    page = compare([run, again]).write(tmp_path / "out")[0].read_text()
    assert "bits_per_byte/ood/code" in page
    assert "Evaluations: again against run" in page


@pytest.fixture
def full_disk():
    """No file may become longer than 20 kB, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_of_the_disk(tmp_path, full_disk):
    published("gpt2", tmp_path / "gpt2")
    run = import_model(tmp_path / "gpt2", tmp_path / "run", tokenizer="byte")
    full_disk()
    with pytest.raises(OSError, match="File too large"):
        import_model(tmp_path / "gpt2", tmp_path / "again", tokenizer="byte")
    for family in (None, "gpt2"):
        with pytest.raises(OSError, match="File too large"):
            export(run, tmp_path / "exported", family=family)
        assert not (tmp_path / "exported" / "model.safetensors").exists()


def test_a_model_is_measured_on_sequences_no_longer_than_its_own(shards, tmp_path):
    data = ["--data", str(shards), "--train", "docs", "--tokenizer", "byte"]
    for positions, expected in ((64, 64), (2048, 1024)):
        folder, run = tmp_path / f"gpt2-{positions}", tmp_path / f"run-{positions}"
        published("gpt2", folder, n_positions=positions)
        cli.run(["import", str(folder), "--out", str(run), *data])
        assert read_config(run)["data"]["sequence_length"] == expected
    cli.run(["eval", "--checkpoint", str(tmp_path / "run-64"), "--tasks", "LossByDomain"])
    assert "loss/in_domain" in newest_results(tmp_path / "run-64")["LossByDomain"].metrics


@pytest.mark.commands
def test_published_models_with_other_tokenizers_share_a_table(shards, files, tmp_path):  # noqa: F811
    """Bits per byte, copying, passkeys, recall, entropy, state and speed of two models, from import to report."""
    for domain in ("docs", "code"):
        documents = map(json.loads, (shards / f"{domain}.jsonl").read_text().splitlines()[:15])
        lines = [json.dumps({"text": document["text"][:2000]}) + "\n" for document in documents]
        (tmp_path / f"{domain}.jsonl").write_text("".join(lines))
    runs = []
    for name, tokenizer in (("gpt2", "byte"), ("mamba2-130m", str(files["sentencepiece"]))):
        sizes = {"n_positions": 768, "n_layer": 1} if name == "gpt2" else {"num_hidden_layers": 1}
        published(name, tmp_path / name, vocab_size=420, **sizes)
        root, run = tmp_path / f"shards_{Path(tokenizer).stem}", tmp_path / f"runs/{name}"
        for domain in ("docs", "code"):
            prepare([tmp_path / f"{domain}.jsonl"], root, domain, tokenizer, holdout=0.5, workers=1)
        words = ["--tokenizer", tokenizer, "--data", root, "--train", "docs", "--ood", "code", "--sequence_length", 768]
        cli.run(["import", *map(str, (tmp_path / name, "--out", run, *words))])
        tasks = ["LossByDomain", "Copying", "passkey", "RepeatGain", "Entropy", "DecodingSpeed"]
        cli.run(["eval", "--checkpoint", str(run), "--tasks", *tasks, "--lengths", "600", "--limit", "2"])
        runs.append(run)
    table = {line.split("  ")[0]: line for line in str(compare(runs)).splitlines()}
    assert table["metric"].split()[1:] == [run.name for run in runs]
    for tag in ("bits_per_byte/ood/code", "loss/ood/code", "loss_recallable/ood/code", "loss_other/ood/code",
                "copying/gain", "passkey_600/contains", "repeat_gain/256", "decoding/tokens_per_second",
                "decoding/state_elements"):  # fmt: skip
        assert len(table[tag].split()) == 3, table[tag]
    assert len(table["entropy/attention"].split()) == 2
    assert len(table["entropy/implied"].split()) == 2
    assert len(table["parameters"].split()) == 3


@pytest.fixture
def begun(exported, shards, tmp_path, without_figures):
    """Trains an imported model for two steps at a rate that changes no weight; its logits, and the run's folder."""
    lm, _, folder = exported(MIXERS["Attention"])
    import_model(folder, tmp_path / "imported")

    def fit(**options):
        every = {**TINY, "data.root": shards, "model.learning_rate": 1e-20, "trainer.max_steps": 2, **options}
        every |= {"run_dir": tmp_path / "new", "from": tmp_path / "imported", "train_loss.every_n_steps": 1}
        cli.run(["fit", *flags(**every)])
        return tmp_path / "new"

    return lm, fit


@torch.no_grad()
def test_training_begins_with_imported_weights(begun, capsys):
    """Steps, text and optimizer begin anew; an interrupted run resumes from its own checkpoint."""
    lm, fit = begun
    new = fit(**{"checkpoint.every_n_steps": 1, "checkpoint.keep": 2})
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.endswith(
        "imported: the optimizer, the steps and the text begin anew; what that model was trained on is unknown"
    )
    assert "steps 0 to 2" in second
    tokens = torch.randint(0, 257, (2, 20))
    torch.testing.assert_close(seqarch.load(new)[0].cpu()(tokens), lm(tokens))
    before, _ = interrupted(new)
    fit(**{"checkpoint.every_n_steps": 1, "checkpoint.keep": 2})
    assert curves(new) == before
    assert "takes the weights" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model.rewarm_steps": 2}, "holds only weights, so the rate begins anew: set model.warmup_steps"),
        ({"model.d_model": 16}, "holds another model"),
    ],
)
def test_imported_weights_that_do_not_fit_are_refused(begun, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        begun[1](**options)
    assert not (tmp_path / "new").exists()


def test_options_that_do_not_fit_are_refused(exported, refuse, tmp_path, shards):
    folder, other = exported(MIXERS["Attention"]).folder, tmp_path / "other"
    prepare([shards / "docs.jsonl"], other, "docs", "mixtral", holdout=0.3, workers=1)
    assert "no folder" in refuse("import", tmp_path / "none", "--out", tmp_path / "run")
    assert "--data needs --train" in refuse("import", folder, "--out", tmp_path / "run", "--data", tmp_path)
    assert "name a new folder" in refuse("import", folder, "--out", folder)
    for data, said in (
        (["none", "--train", "docs"], "there is no folder 'none': prepare one"),
        ([shards, "--train", "dosc"], "unknown domain in"),
        ([shards, "--train", "docs", "--ood", "docs"], "the OOD domain 'docs' is named twice"),
        ([other, "--train", "docs", "--sequence_length", 32], "has the tokenizer mixtral, but the model was trained"),
    ):
        assert said in refuse("import", folder, "--out", tmp_path / "run", "--data", *data)
    assert not (tmp_path / "run").exists()
    (folder / "config.json").unlink()
    assert "there is no file '" in refuse("import", folder, "--out", tmp_path / "run")

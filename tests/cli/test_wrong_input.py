"""Every wrong input gives one line on stderr and exit status 2. It names the key or FILE:LINE and the right form."""

from pathlib import Path

import pytest
import torch

from seqarch.arguments import Count
from seqarch.experiment.checker import first_sentence, options_of, parser_of_class
from seqarch.mixers.attention import Top1Chunk
from tests.conftest import MODEL, TINY, flags

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.yaml"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["fit", "--data.train={docs: 1, docs: 2}"],
            "a value of the command line:1: 'docs' is already in line 1: keep one",
        ),
        (
            ["fit", "--data.train={[docs]: 1}"],
            "a value of the command line:1: a key must be a word, not a list or a mapp",
        ),
        (["fit", "--run_dir=r\udcff"], "the text '--run_dir=r\\udcff' is not UTF-8"),
        (["fti"], "unknown command 'fti': did you mean fit?"),
        (["--config", "x"], "--config is in the place of the command: write seqarch fit --config x"),
        (["fit"], "missing --model.vocab_size, --model.d_model, --model.n_layers, --model.mixers (or a recipe that"),
        (["fit", "--config"], "--config needs a value"),
        (["fit", "--config="], "--config needs a value"),
        (["fit", "--config=", "--run_dir", "r"], "--config needs a value"),
        (["fit", "--config", "--run_dir", "r"], "--config needs a value"),
        (["fit", "quickstart"], "unexpected argument 'quickstart': a recipe is given with --config quickstart"),
        (["report", "", "--out", "o"], "runs is empty: give it a value, or leave it out"),
        (["report", "nowhere", "", "--out", "o"], "runs is empty: give it a value, or leave it out"),
        (["data", "prepare", "", "--out", "y", "--domain", "d"], "files is empty: give it a value, or leave it out"),
        (["fit", "--config", "nope.yaml"], "there is no file 'nope.yaml': name a recipe"),
        (["fit", "--config", "."], "unknown recipe '.'"),
        (["fit", "recipe.yaml", "--config", QUICKSTART], "unexpected argument 'recipe.yaml': a recipe is given"),
        (["fit", "--config", QUICKSTART, "--model.d_modl=3"], "unknown option --model.d_modl: did you mean --model.d"),
        (["fit", "--config", QUICKSTART, "--model.lr=1"], "option --model.lr: did you mean --model.learning_rate?"),
        (["fit", "--config", QUICKSTART, "--trainer.max_steps=x"], "trainer.max_steps is x: expected a whole number"),
        (["fit", "--config", QUICKSTART, "--model.feed_forward=GeLU"], "model.feed_forward: there is no FeedF"),
        (["data"], "missing command: expected prepare, show, check, join or rows"),
        (["mixers", "new", "Sliding", "--out", "a\0b"], "the name of a file or folder holds a null byte"),
        (["report", "nowhere", "--out", ""], "out is empty: give it a value, or leave it out"),
        (
            ["data", "prepare", "x.jsonl", "--out", "", "--domain", "d"],
            "out is empty: give it a value, or leave it out",
        ),
        (["data", "show", ""], "root is empty: give it a value, or leave it out"),
        (["fit", "--config", QUICKSTART, "--trainer.strategy=ddp_notebook"], "strategy 'ddp_notebook': expected auto"),
        (["fit", "--config", QUICKSTART, "--trainer.strategy=ddp_spawn"], "strategy 'ddp_spawn': expected auto"),
        (["fit", "--config", QUICKSTART, "--model.mixers.attention.dict_kwargs.x=1"], "Attention has no option 'x'"),
        (["recipes", "cpy"], "unknown command 'cpy': did you mean copy?"),
        (["recipes", "copy"], "missing NAME"),
        (["recipes", "copy", "nope"], "unknown recipe 'nope' (`seqarch recipes` lists all)"),
        (["data", "prepar"], "unknown command 'prepar': did you mean prepare?"),
        (["data", "prepare", "x.jsonl", "--out", "y"], "name the domain with --domain"),
        (["data", "prepare", "x.jsonl", "--out", "y", "--domain", "d"], "there is no file 'x.jsonl'"),
        (["data", "prepare", "x.pdf", "--out", "y", "--domain", "d"], "x.pdf: cannot read this kind of file"),
        (["data", "show", "."], "there is no prepared domain in '"),
        (["report", "nowhere", "--out", "s3://b/x"], "--out s3://b/x is a URL: name a local folder"),
        (["report", "nowhere", "--out=~/x"], "--out ~/x would make a folder named ~ here: write /"),
        (["mixers", "new", "Sliding", "--out=~/x"], "--out ~/x would make a folder named ~ here: write /"),
        (["bench", "mixers", "--csv", "s3://b/x"], "--csv s3:/b/x is a URL: name a local folder"),
        (["eval", "--list", "--lengths", "64", "9" * 18], "--lengths must lie in 1..1073741824, not 999"),
        (["eval", "--list", "--lengths", "64", "x"], "lengths is x: expected a whole number"),
        (["data", "show", "s3:/b/x"], "s3:/b/x is not a URL of object storage: give s3://bucket/folder"),
        (["data", "show", "nowhere"], "there is no folder 'nowhere'"),
        (["data", "show", "embeded"], "there is no folder 'embeded': did you mean embedded"),
        (["report"], "missing RUNS, --out"),
        (["report", "nowhere", "--out", "o"], "there is no run folder 'nowhere'"),
        (["report", ".", "--out", "o"], ". is not a run folder"),
        (["mixers", "--jsn"], "unknown option --jsn: did you mean --json?"),
        (["generate", "--prompt", "a"], "missing --checkpoint"),
        (["generate", "--checkpoint", "nope", "--prompt"], "--prompt needs a value"),
        (["generate", "--checkpoint", "nope", "--prompt", "a"], "there is no checkpoint 'nope'"),
        (
            ["generate", "--checkpoint", "nope", "--prompt", "a", "--top_k=x"],
            "is x: expected a whole number (at least 1)",
        ),
        (["data", "prepare", "a.md", "--out=y", "--holdout=nan"], "holdout is nan: expected a number (in 0..1)"),
        (["validate", "--config", QUICKSTART], "validate needs --ckpt_path"),
    ],
)
def test_wrong_command_line(refuse, args, said):
    assert said in refuse(*args)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run_dir": None}, "fit needs --run_dir"),
        ({"run_dir": "a_file"}, "a_file is a file: name a folder"),
        ({"run_dir": "s3://b/x"}, "--run_dir s3://b/x is a URL: name a local folder"),
        ({"run_dir": "s3:/b/x"}, "--run_dir s3:/b/x is a URL: name a local folder"),
        ({"run_dir": "~/x"}, "--run_dir ~/x would make a folder named ~ here: write /"),
        ({"run_dir": "notes"}, "notes is not a run folder, it holds a, b, c: name a new or empty one"),
        ({"trainer.max_steps": -1}, "trainer.max_steps is not set, or below 1: give the number"),
        ({"trainer.max_steps": 0}, "trainer.max_steps is not set, or below 1: give the number of steps"),
        ({"run_dir": ""}, "fit needs --run_dir"),
        ({"model.d_model": 0}, "d_model must be at least 1, not 0"),
        ({"model.n_layers": 10**9}, "n_layers times loops must be at most 10,000, not 1,000,000,000"),
        ({"model.loops": 2**62}, "n_layers times loops must be at most 10,000, not 9,223,372,036,854,775,808"),
        ({"data.cache_gb": "-inf"}, "data.cache_gb is -inf: expected a number"),
        ({"model.learned_positions": -4}, "model.learned_positions must be at least 0, not -4"),
        ({"model.learning_rate": -1}, "model.learning_rate must be positive, not -1"),
        ({"model.betas": "[0.9, 2]"}, "model.betas must lie in 0..1, 1 excluded, not 2"),
        ({"model.weight_decay": ".nan"}, "model.weight_decay must be at least 0, and finite, not nan"),
        ({"trainer.accelerator": "tpuu"}, "invalid accelerator name: `accelerator='tpuu'`. Available names are"),
        ({"trainer.strategy": "fspd2"}, "unknown trainer.strategy 'fspd2': did you mean fsdp2?"),
        ({"trainer.devices": -4}, "should be an int > 0"),
        ({"trainer.accumulate_grad_batches": 2}, "leave trainer.accumulate_grad_batches out: data"),
        ({"trainer.callbacks": "EarlyStopping"}, "trainer.callbacks: EarlyStopping needs the option monitor"),
        ({"trainer.callbacks": "{class_path: EarlyStopping, init_args: {monitor: x, mode: up}}"}, "got up"),
        ({"model.mixers": "{a: Top1Chunk}"}, "model.mixers.a: Top1Chunk needs the option n_heads"),
        ({"model.mixers": "{a: {class_path: RWKV7}}"}, "model.mixers.a: RWKV7 needs the option n_heads in init_args"),
        ({"model.mixers": "{a: {init_args: {n_heads: 2}}}"}, "class_path is missing: {class_path: NAME, init_args: "),
        ({"model.mixers": "{a: {class_path: Attention, init_args: {n_heads: 7}}}"}, "n_heads=7 does not divide"),
        ({"model.pattern": "[b]"}, "unknown mixer name in pattern 'b'"),
        ({"model.pattern": "[attention, 012]"}, "unknown mixer name in pattern '012': expected attention"),
        ({"data.train": "{3: 1}"}, "unknown domain in "),
        (
            {"data.sequences_per_step": 10**15},
            "data.sequences_per_step (at most the sequences of the training splits) must lie in 1..",
        ),
        (
            {"model.mixers": "{a: {class_path: Top1Chunk, init_args: {n_heads: 4, chunk_size: 9223372036854775808}}}"},
            "chunk_size must be at least 1, and at most 9,223,372,036,854,775,807, not 9223372036854775808",
        ),
        (
            {"trainer.callbacks": "{class_path: EvaluateTasks, init_args: {tasks: [Copying], every_n_steps: -2}}"},
            "EvaluateTasks.every_n_steps must be at least 0, not -2",
        ),
        (
            {"trainer.callbacks": "{class_path: EarlyStopping, init_args: {monitor: nothing}}", "trainer.max_steps": 1},
            "Early stopping conditioned on metric `nothing` which is not available",
        ),
        ({"trainer.logger": "CometLogger"}, "Comet': Requirement 'comet-ml"),
        ({"model.feed_forward": "{class_path: GeGLU, init_args: {hidden: 0}}"}, "hidden must be at least 1, not 0"),
        ({"model.vocab_size": 100}, "the tokenizer 'byte' has 257 tokens: set model.vocab_size, 100, to that"),
        ({"data.root": "nowhere"}, "there is no folder 'nowhere': prepare one with `seqarch"),
        ({"data.root": "a_file"}, "there is no folder 'a_file' (a file): prepare one with `seqarch"),
        ({"trainer.fast_dev_run": "true"}, "trainer.fast_dev_run is "),
        ({"data.train": "{dosc: 1.0}"}, "did you mean docs?"),
        ({"data.micro_batch_size": 3}, "data.micro_batch_size x devices=3 does not divide data.sequences_per_step=4"),
        ({"ckpt_path": "a_file"}, "a_file is damaged: it is cut short or no checkpoint"),
        ({"ckpt_path": "other.ckpt"}, "other.ckpt is not a checkpoint of seqarch"),
        ({"ckpt_path": "nope.ckpt"}, "there is no checkpoint 'nope.ckpt'"),
        ({"ckpt_path": "notes"}, "notes is neither checkpoint nor run: name a checkpoint, or a run with one"),
        ({"model.d_model": 99999999999}, "n_heads=4 does not divide d_model=99999999999"),
        ({"model.d_model": 80000000000}, "there is not enough memory: choose smaller sizes"),
        (
            {"model.d_model": 10**22},
            "d_model must be at least 1, and at most 9,223,372,036,854,775,807, not 10000000000000000000000",
        ),
        (
            {"model.vocab_size": 100000000000},
            "3,200,000,032,928 parameters take at least 47,684 GiB of memory in training, and this",
        ),
        ({"seed_everything": -1}, "seed_everything must lie in 0..4294967295, not -1"),
        ({"seed_everything": 99999999999999}, "seed_everything must lie in 0..4294967295, not 99999999999999"),
        ({"seed_everything": "false"}, "seed_everything is false: expected a whole number"),
        ({"data.seed": -5}, "data.seed must lie in 0..4294967295, not -5"),
        ({"model.mixers": '{"": {class_path: Attention, init_args: {n_heads: 4}}}'}, "a mixer cannot be called ''"),
        ({"data.root": "embeded"}, "there is no folder 'embeded': did you mean embedded, the built-in corpus?"),
    ],
)
def test_fit_that_cannot_work(refuse, tmp_path, shards, options, said):
    (tmp_path / "a_file").write_bytes(b"\x01\x02" * 500)
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.ckpt")
    for name in "abcde":
        (tmp_path / "notes" / name).mkdir(parents=True)
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": "run", **options}
    given = {key: value for key, value in options.items() if value is not None}
    assert said in refuse("fit", *flags(**given))


@pytest.mark.parametrize("steps", [3, 4])
def test_checkpoint_that_leaves_no_step(refuse, fit, shards, steps):
    run = fit()
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": "other", "trainer.max_steps": steps}
    path = run / "checkpoints/step_00000004.ckpt"
    said = refuse("fit", *flags(**options, ckpt_path=path))
    assert said == f"{path} is of step 4, so no step is left: trainer.max_steps is {steps}"


def test_checkpoint_that_is_not_there_is_refused_for_a_finished_run_too(refuse, fit, shards):
    run = fit()
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": run, "ckpt_path": "nope.ckpt"}
    assert refuse("fit", *flags(**options)) == "there is no checkpoint 'nope.ckpt'"


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ('{"text": "a"}\n{"text": \n', [], "a.jsonl:2: is not JSON"),
        ('{"text": "a"}\n{"txt": "b"}\n', [], "a.jsonl:2: has no field 'text', only txt"),
        ('{"text": 3}\n', [], "a.jsonl:1: field 'text' holds a number, not text"),
        ("", [], "a.jsonl: the file is empty"),
        ('{"text": "a"}\n', ["--tokenizer", "bite"], "unknown tokenizer 'bite': did you mean byte?"),
        ('{"text": "a"}\n', ["--holdout", "lots"], "holdout is lots: expected a number"),
        ('{"text": "a"}\n', ["--out", "s3:/b/x"], "s3:/b/x is not a URL of object storage: give s3://bucket/folder"),
    ],
)
def test_text_that_cannot_be_prepared(refuse, tmp_path, text, options, said):
    (tmp_path / "a.jsonl").write_text(text)
    defaults = ["--domain", "x", "--workers", "1"] + ([] if "--tokenizer" in options else ["--tokenizer", "byte"])
    assert said in refuse("data", "prepare", "a.jsonl", "--out", "s", *defaults, *options)


def test_bug_keeps_its_traceback(monkeypatch, fit):
    def broken(*args, **kwargs):
        raise ValueError("a bug of ours")

    monkeypatch.setattr("seqarch.training.LanguageModel.training_step", broken)
    with pytest.raises(ValueError, match="a bug of ours"):
        fit()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ('Parser key "model.d_model":\n  Worded anew: not good.\n  More.', "model.d_model: Worded anew: not good."),
        ("Something else is wrong.\nAnd a dump of it\n", "Something else is wrong."),
        ("", "the command line is wrong; --help shows what is accepted"),
    ],
)
def test_unknown_wording_is_cut_to_its_first_sentence(message, line):
    assert first_sentence(message) == line


def test_private_attribute_of_jsonargparse_that_the_checker_reads():
    """jsonargparse 4.53 has `_typehint` of an option. Without it the checker would check no value."""
    options = options_of(parser_of_class(Top1Chunk, 3))
    assert options["chunk_size"].hint is Count
    assert (options["n_heads"].required, options["chunk_size"].required) == (True, False)
    assert "d_model" not in options


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model.warmup_step=3"], "unknown option --model.warmup_step: did you mean --model.warmup_steps?"),
        (["--conf", "x.yaml"], "unknown option --conf: did you mean --config?"),
        (["--trainer.callbacks+=TQDM"], "unknown option --trainer.callbacks+: did you mean --trainer.callbacks?"),
        (["--model.d_model"], "--model.d_model needs a value"),
        (
            ["--model.feed_forward.class_path=GeGLU", "--model.feed_forward.init_args.hidde=3"],
            "GeGLU has no option 'hidde'",
        ),
        (
            ["--model.mixers.attention.init_args.n_heads=four"],
            "model.mixers.attention.n_heads is four: expected a whole",
        ),
    ],
)
def test_flag_is_judged_with_the_recipe(refuse, args, said):
    assert said in refuse("fit", "--config", QUICKSTART, *args)

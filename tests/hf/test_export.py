"""`seqarch export`: its files, the tokenizers, weights alone, and what it refuses."""

import functools
import json
import random
import re
import shutil
from typing import Any
from unittest import mock

import pytest
import torch

import seqarch
import seqarch.mixers
from seqarch import cli
from seqarch.data.codecs import TIKTOKEN
from seqarch.data.tokenizer_files import find_tokenizer
from seqarch.data.tokenizers import begin_document, load_tokenizer
from seqarch.errors import UserError
from seqarch.runs.folder import named_checkpoint, read_config, read_record, write_record
from seqarch.training.checkpoint import export_weights, read_checkpoint
from seqarch.training.weights import write_content
from tests.data.test_tokenizer_files import (
    CORPUS,
    ENTRIES,
    SentencePieceTrainer,
    files,  # noqa: F401 - a fixture
    tekken_file,
    tiktoken_file,
    world_file,
)
from tests.data.test_tokenizer_files import TEXTS as FILE_TEXTS
from tests.hf.conftest import checkpoint
from tests.hf.test_model import MIXERS, loaded, mixer

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from seqarch.hf.export import export
from seqarch.hf.imports import import_model
from seqarch.hf.tokenizer import as_hugging_face

FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_seqarch.py"}
TEXTS = [
    "", "Hello world", " leading", "two  spaces", "tab\tnew\nline\r\n", "naïve café 漢字 🙂\u200b", "</s> <s> <unk>",
    "<|endoftext|>", "a" * 300, "▁under", "\x00\x01", "x = [1, 2]\n    return\n", "<0x41>", "\ufeffmark", "trailing  ",
]  # fmt: skip


def drawn(count):
    """Texts of letters of many scripts."""
    draw = random.Random(0)
    ranges = [(32, 127), (1, 0x500), (32, 33), (10, 11), (0x4E00, 0x9FFF), (0x1F300, 0x1F700)]
    return [
        "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(1, 60))) for _ in range(count)
    ]


def small_tiktoken(folder, like) -> Any:
    """A file of few entries that splits text as one of `like` entries."""
    path = tiktoken_file(folder)
    with mock.patch.dict(TIKTOKEN, {ENTRIES: TIKTOKEN[like]}):
        ours = find_tokenizer(str(path))
        ours.encode("")  # reads the file
    return ours


def pieces(folder, **options):
    """A file of SentencePiece; without options as its trainer makes it: unigrams that normalise text."""
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(folder / "small"), vocab_size=450, hard_vocab_limit=False,
        byte_fallback=True, minloglevel=2, **options,
    )  # fmt: skip
    return find_tokenizer(str(folder / "small.model"))


TOKENIZERS = {
    "byte": lambda _: load_tokenizer("byte"),
    "mixtral": lambda _: load_tokenizer("mixtral"),
    "tekken": lambda folder: find_tokenizer(str(tekken_file(folder))),
    **{f"tiktoken {count}": functools.partial(small_tiktoken, like=count) for count in TIKTOKEN},
    "unigrams": pieces,
    "pairs": functools.partial(pieces, model_type="bpe", user_defined_symbols=["seqarch!"]),
    "llama": functools.partial(
        pieces, model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False
    ),
    "rwkv_world": lambda folder: find_tokenizer(str(world_file(folder))),
    "no prefix": functools.partial(pieces, add_dummy_prefix=False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokenizer_gives_our_ids_after_the_border(name, tmp_path):
    ours = TOKENIZERS[name](tmp_path)
    as_hugging_face(ours, 1000).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) <= ours.vocab_size
    for text in [*TEXTS, *FILE_TEXTS, *drawn(200)]:
        ids = theirs(text)["input_ids"]
        assert ids == [ours.eos_id, *ours.encode(text)]
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ours.encode(text))
    assert theirs("a", add_special_tokens=False)["input_ids"] == ours.encode("a")


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "sentencepiece", "rwkv_world"])
def test_a_tokenizer_that_is_a_file_goes_along(kind, files, tmp_path):  # noqa: F811
    ends = {"bpe": "<|endoftext|>", "unigram": "</s>"}
    given = {"eos_token": ends[kind]} if kind in ends else {}
    ours = find_tokenizer(str(files[kind]), **given)
    path = checkpoint(tmp_path, MIXERS["Attention"], tokenizer=ours, vocab_size=ours.vocab_size)
    folder = export(path, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in [*CORPUS, *FILE_TEXTS]:
        assert theirs(text)["input_ids"] == begin_document(ours, ours.encode(text))
    assert theirs.eos_token_id == ours.eos_id
    assert seqarch.load(folder / "model.safetensors")[1].name == ours.name
    assert loaded(folder).num_parameters() == seqarch.load(path)[0].n_parameters()


def test_a_model_that_read_each_document_alone_does_so_in_every_form(shards, tmp_path):
    path = checkpoint(tmp_path, MIXERS["Attention"])
    content = read_checkpoint(path)
    content["TextDataModule"]["document_mask"] = True
    write_content(path, content)
    folder = export(path, tmp_path / "out")
    data = {"root": str(shards), "train": {"docs": 1}, "sequence_length": None}
    run = import_model(folder, tmp_path / "run", data=data)
    for each in (folder / "model.safetensors", run):
        assert seqarch.load(each)[0].document_mask
    assert read_config(run)["data"]["document_mask"]
    other = import_model(folder, tmp_path / "other", data={**data, "document_mask": False})
    assert not read_config(other)["data"]["document_mask"]
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(["the", ""], ["dog", ""])["input_ids"] == [[*b"thedog"], []]
    assert theirs.bos_token_id == 256


def test_a_tokenizer_that_other_tools_do_not_read_stays_out_of_their_folders(tmp_path):
    world = find_tokenizer(str(world_file(tmp_path)))
    path = checkpoint(tmp_path, MIXERS["Attention"], tokenizer=world, vocab_size=world.vocab_size)
    with pytest.raises(UserError, match=r"only seqarch.hf reads the tokenizer 'rwkv_world-\w+'"):
        export(path, tmp_path / "out", family="llama")


def test_a_tokenizer_whose_ids_would_be_others_is_named(tmp_path):
    reversed_order = small_tiktoken(tmp_path, 50_256)
    ranks = reversed_order.codec.ranks
    reversed_order.codec.ranks = dict(zip(ranks, reversed(ranks.values()), strict=True))
    with pytest.raises(UserError, match="its ids would be others"):
        as_hugging_face(reversed_order, 100)


@pytest.mark.commands
def test_the_command_writes_a_run_as_a_folder_with_a_card(run_dir, tmp_path, capfd):
    out = tmp_path / "exported"
    cli.run(["export", str(run_dir), "--out", str(out)])
    assert capfd.readouterr().out == f"wrote {out}\n"
    assert {path.name for path in out.iterdir()} == {*FILES, "tokenizer.json", "tokenizer_config.json"}
    lm, _ = seqarch.load(run_dir)
    tokens = torch.randint(0, 257, (2, 20))
    with torch.no_grad():
        assert torch.equal(loaded(out)(tokens).logits, lm.cpu()(tokens))
    card = (out / "README.md").read_text()
    assert re.search(r"\| code +\| ood +\| \d\.\d{3} +\|", card)
    assert f"{lm.n_parameters():,}" in card
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "who may read the card may read the weights"
    assert "class_path: seqarch.mixers.attention.Attention" in card
    exported = "".join((out / name).read_text() for name in FILES if not name.endswith("safetensors"))
    assert str(run_dir.parent) not in exported, "a folder of this machine is not for the public"


def test_a_run_is_exported_without_what_it_does_not_say(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    write_record(run, {**read_record(run), "train": None})
    path = named_checkpoint(run)
    content = read_checkpoint(path)
    content["seqarch"]["sources"] = {"0": 1}
    torch.save({**content, "TextDataModule": None}, path.with_name("step_00000009.ckpt"))
    card = (export(run, tmp_path / "out") / "README.md").read_text()
    assert re.search(r"training files +\| 1 ", card)
    assert "training domains" not in card


def test_weights_alone_load_and_evaluate_as_the_checkpoint(run_dir, tmp_path):
    file = tmp_path / "model.safetensors"
    cli.run(["export", str(run_dir), "--out", str(file), "--weights"])
    ours, theirs = seqarch.load(run_dir)[0], seqarch.load(file)[0]
    assert {*theirs.state_dict()} == {*ours.state_dict()}
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    with pytest.raises(UserError, match=r"must end in \.safetensors"):
        export_weights(run_dir, tmp_path / "model.bin")


def test_a_class_that_is_not_installed_is_named(tmp_path, exported):
    folder = exported(MIXERS["Attention"]).folder
    config = json.loads((folder / "config.json").read_text())
    for name, said in (
        ("absent_package.TheirMixer", "absent_package.TheirMixer"),
        ("seqarch.mixers.attention.Gone", "there is no class seqarch.mixers.attention.Gone"),
        ("seqarch.experiment.load.load", "is a function, not a class"),
    ):
        config["seqarch"]["hyper_parameters"]["mixers"]["mixer"]["class_path"] = name
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=said):
            loaded(folder)


def test_what_cannot_be_written_is_refused(tmp_path, refuse):
    path = checkpoint(tmp_path, MIXERS["Attention"])
    (tmp_path / "file").touch()
    assert "file exists: name a new folder" in refuse("export", path, "--out", tmp_path / "file")
    assert "no checkpoint" in refuse("export", tmp_path / "none.ckpt", "--out", tmp_path / "out")


@pytest.mark.parametrize("name", ["README.md", "config.json"])
def test_what_is_there_is_left_as_it_is(tmp_path, name):
    path, out = checkpoint(tmp_path, MIXERS["Attention"]), tmp_path / "theirs"
    out.mkdir()
    (out / name).write_text("mine")
    with pytest.raises(UserError, match=f"{out} exists: name a new folder"):
        export(path, out)
    kept = path.read_bytes()
    with pytest.raises(UserError, match=f"{path} exists: name a new file"):
        export_weights(path, path)
    assert path.read_bytes() == kept
    assert [each.name for each in out.iterdir()] == [name]
    assert (out / name).read_text() == "mine"
    (out / name).unlink()
    assert (export(path, out) / "model.safetensors").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pattern": ["mixer", "none"]}, "it has no weight lm.blocks.1.mixer.out.weight"),
        ({"no_feed_forward": ["mixer"]}, "no_feed_forward is True, not False"),
    ],
)
def test_blocks_that_a_family_lacks_are_named(tmp_path, options, said):
    path = checkpoint(tmp_path, MIXERS["Attention"], feed_forward={"class_path": "seqarch.model.SwiGLU"}, **options)
    with pytest.raises(UserError, match=f"LlamaForCausalLM cannot express this model: .*{said}"):
        export(path, tmp_path / "out", family="llama")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "mixers", "options", "said"),
    [
        ("mamba2", MIXERS["Mamba2"], {"feed_forward": None, "norm_eps": 0.01}, "layer_norm_epsilon 0.01"),
        ("mistral", mixer("Attention", n_heads=4, bias=True), {"feed_forward": {"class_path": "SwiGLU"}}, "_bias True"),
    ],
)
def test_a_model_that_transformers_computes_otherwise_is_not_written(tmp_path, family, mixers, options, said):
    path = checkpoint(tmp_path, mixers, **options)
    with pytest.raises(UserError, match=f"cannot express this model: config.json has .*{said}: seqarch computes "):
        export(path, tmp_path / "out", family=family)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_state_generates_without_one(tmp_path):
    mixers = {"mixer": {"class_path": "tests.hf.test_export.Mean"}}
    path = checkpoint(tmp_path, mixers, allow_code=("tests",))
    folder = export(path, tmp_path / "out", allow_code="tests")
    model = loaded(folder, allow_code=("tests",))
    tokens = torch.ones(1, 3, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, seqarch.load(path, "tests")[0].cpu()(tokens))
    assert model.generation_config.use_cache is False
    assert model.generate(tokens, max_new_tokens=4, do_sample=False).shape == (1, 7)


class Mean(seqarch.mixers.Mixer):
    """The mean of all tokens so far; a buffer that no file holds scales it."""

    def __init__(self, d_model, layer_idx, n_layers):
        super().__init__(d_model, layer_idx, n_layers)
        self.register_buffer("scale", torch.full((d_model,), 2.0), persistent=False)

    def forward(self, x):
        return self.scale * x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

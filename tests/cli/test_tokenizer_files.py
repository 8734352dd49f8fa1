"""A tokenizer of the user's own, from the text to the generated text."""

import inspect
import json
import shutil

import pytest
import torch

import seqarch
from seqarch import cli
from seqarch.data.tokenizers import begin_document
from seqarch.errors import UserError
from seqarch.runs.folder import read_record
from tests.cli.test_commands import output
from tests.conftest import flags

pytestmark = pytest.mark.commands

tokenizers = pytest.importorskip("tokenizers")

SIZE = 131_075
MODEL = {"model.d_model": 16, "model.n_layers": 1, "model.vocab_size": SIZE, "model.compile": False}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two domains of a tokenizer with more than 131,072 entries, whose file is gone."""
    folder = tmp_path_factory.mktemp("own")
    texts = [inspect.getdoc(getattr(str, name)) or "" for name in dir(str)] * 3
    words = list(dict.fromkeys(" ".join(texts).split()))
    unused = [f"unused{i}" for i in range(SIZE - 3 - len(words))]
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *unused, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for domain in ("web", "far"):
        cli.run([
            "data", "prepare", str(folder / "text.jsonl"), "--out", str(folder / "shards"), "--domain", domain,
            "--tokenizer", str(folder / "tokenizer.json"), "--eos_token", "</s>", "--bos_token", "<s>",
            "--holdout", "0.2", "--workers", "1",
        ])  # fmt: skip
    cli.run(["data", "prepare", str(folder / "text.jsonl"), "--out", str(folder / "shards"), "--domain", "bytes",
             "--tokenizer", "byte", "--holdout", "0.2", "--workers", "1"])  # fmt: skip
    (folder / "tokenizer.json").unlink()
    return folder / "shards"


@pytest.fixture
def trained(prepared, fit):
    data = {"data.root": prepared, "data.train": "{web: 1.0}", "data.ood": "[far]", "data.sequence_length": 16}
    return fit(**MODEL, **data, **{"trainer.max_steps": 2})


def test_a_checkpoint_needs_no_other_file(trained, tmp_path, capsys):
    copy = shutil.copy(next((trained / "checkpoints").glob("*.ckpt")), tmp_path / "alone.ckpt")
    tokenizer = seqarch.load(trained)[1]
    assert {path.name: path.read_bytes() for path in (trained / "tokenizer").iterdir()} == tokenizer.files
    assert read_record(trained)["tokenizer"] == tokenizer.name
    shutil.rmtree(trained)
    lm, tokenizer = seqarch.load(copy)
    assert begin_document(tokenizer, tokenizer.encode("Return a copy"))[0] == tokenizer.bos_id == 0
    assert lm.vocab_size == tokenizer.vocab_size == SIZE
    assert tokenizer.decode(tokenizer.encode("Return a copy")) == "Return a copy"
    said = output(capsys, "generate", "--checkpoint", copy, "--prompt", "Return a copy", "--max_new_tokens", 3)
    assert said.startswith("Return a copy")


def test_a_checkpoint_of_other_files_is_refused(trained, tmp_path):
    path = next((trained / "checkpoints").glob("*.ckpt"))
    content = torch.load(path, weights_only=True)
    files = content["seqarch"]["tokenizer_files"]
    for change, said in [
        ({"tokenizer.json": files["tokenizer.json"][1:]}, "is not the file of the tokenizer tokenizer_json-"),
        ({"seqarch_tokenizer.json": files["tokenizer.json"][:0]}, "is not JSON"),
        ({"tokenizer.json": "text"}, "its 'tokenizer_files' hold more than bytes"),
    ]:
        content["seqarch"]["tokenizer_files"] = {**files, **change}
        torch.save(content, tmp_path / "changed.ckpt")
        with pytest.raises(UserError, match=said):
            seqarch.load(tmp_path / "changed.ckpt")[1].encode("text")


def test_what_does_not_fit_together(prepared, refuse):
    options = {"data.root": prepared, "data.train": "{web: 1.0}", "data.sequence_length": 16, "run_dir": "run"}
    train = "fit", "--config", "quickstart", *flags(**options)
    said = refuse(*train, "--data.ood", "[far]")
    assert said.startswith("the tokenizer 'tokenizer_json-")
    assert "' has 131,075 tokens: set model.vocab_size, 257, to that, or take another tokenizer" in said
    said = refuse(*train, "--data.ood", "[bytes]")
    assert "domains must share a tokenizer, but 'web' has tokenizer_json-" in said


def test_shown_texts_are_decoded(prepared, capsys):
    said = output(capsys, "data", "show", prepared / "web")
    assert "S.startswith" in said or "Return" in said
    assert "tokenizer_json-" in said

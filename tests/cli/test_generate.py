"""`seqarch generate` as users type it, on a checkpoint of a few steps."""

import json
import re

import pytest
import torch

import seqarch
from seqarch import cli
from seqarch.errors import UserError
from seqarch.evaluation import Scorer
from seqarch.runs.folder import read_config, write_config
from seqarch.training.checkpoint import read_checkpoint
from tests.cli.test_commands import output


def test_generate_goes_on_from_the_prompt(checkpoint, capsys):
    args = ("generate", "--checkpoint", checkpoint, "--prompt", "The ", "--max_new_tokens", 12)
    said = output(capsys, *args)
    assert said.startswith("The ")
    assert len(said) > len("The \n")
    assert output(capsys, *args) == said
    assert output(capsys, *args, "--seed", 1) != said


@pytest.mark.parametrize(
    ("drawn", "text"),
    [
        ([256], "The"),
        (["\N{EURO SIGN}".encode()[0]], "The\N{REPLACEMENT CHARACTER}"),
        ([*"a\N{EURO SIGN}b".encode(), 256], "Thea\N{EURO SIGN}b"),
    ],
    ids=["nothing", "half a character", "bytes"],
)
def test_the_prompt_and_all_that_was_drawn_are_shown(checkpoint, capsys, monkeypatch, drawn, text):
    monkeypatch.setattr("seqarch.experiment.load.stream", lambda *_, **__: ((0, token) for token in drawn))
    args = ("--prompt", "The", "--max_new_tokens", len(drawn))
    assert output(capsys, "generate", "--checkpoint", checkpoint, *args) == text + "\n"


def test_a_prompt_begins_a_document_as_in_training_and_eval(checkpoint):
    lm, tokenizer = seqarch.load(checkpoint)
    read = []
    lm.embedding.register_forward_pre_hook(lambda _, inputs: read.extend(inputs[0].flatten().tolist()))
    for lm.document_mask, expected in ((False, [tokenizer.eos_id, *b"The"]), (True, [*b"The"])):
        read.clear()
        "".join(seqarch.generate_text(lm, tokenizer, "The", 1))
        assert read == Scorer(lm, tokenizer).prompt(tokenizer.encode("The")) == expected


def test_a_checkpoint_of_another_model_is_refused_in_a_run_folder(checkpoint, tmp_path, refuse):
    run = tmp_path / "run"
    moved = run / "checkpoints/step_00000004.ckpt"
    moved.parent.mkdir(parents=True)
    content, config = read_checkpoint(checkpoint), read_config(checkpoint.parents[1])
    write_config(run, config)
    del content["hyper_parameters"]["norm_eps"]  # as of a version before this option
    torch.save(content, moved)
    assert seqarch.load(run)[1].name == "byte"
    config["model"]["mixers"]["attention"]["init_args"]["window"] = 9  # the weights fit
    write_config(run, config)
    for args in (["generate", "--prompt", "a"], ["eval", "--tasks", "Copying"]):
        said = "holds another model than its run (model.mixers.attention.init_args.window was None, is 9)"
        assert f"{moved} {said}" in refuse(*args, "--checkpoint", run)
    assert sorted(each.name for each in run.iterdir()) == ["checkpoints", "config.yaml"]


def test_a_continuation_ends_before_a_stop_text(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("seqarch.experiment.load.stream", lambda *_, **__: ((0, token) for token in b"a\n b\n\n"))
    loaded = seqarch.load(checkpoint)
    shown = [*seqarch.generate_text(*loaded, "The", 9, stop=["\n\n", "zz"])]
    assert shown == ["The", "a", "", "\n ", "b", "", "", ""]
    assert "".join(shown) == "Thea\n b"
    assert "".join(seqarch.generate_text(*loaded, "The", 9, stop="\n\n")) == "Thea\n b"


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        (5, {}, "prompt must be str, not 5"),
        (["a", "b"], {}, "prompt must be str, not ['a', 'b']"),
        ("a", {"stop": [b"b"]}, "stop must be str | Sequence[str], not [b'b']"),
        ("a", {"top_k": "x"}, "top_k must be int | None, not 'x'"),
    ],
)
def test_what_has_a_wrong_type_is_refused(checkpoint, prompt, options, said):
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        seqarch.generate_text(*seqarch.load(checkpoint), prompt, 5, **options)


def test_generate_takes_a_file_of_prompts(checkpoint, tmp_path, capsys):
    texts = ["The ", "A much longer prompt, which is read ", "So "]
    (tmp_path / "p.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text, "id": 1}) + "\n" for text in texts))
    args = ("generate", "--checkpoint", checkpoint, "--temperature", 0, "--max_new_tokens", 6)
    rows = [json.loads(line) for line in output(capsys, *args, "--prompts", tmp_path / "p.txt").splitlines()]
    assert sorted((row["index"], row["prompt"]) for row in rows) == list(enumerate(texts))
    for row in rows:
        assert output(capsys, *args, "--prompt", row["prompt"]) == row["prompt"] + row["text"] + "\n"
    again = output(capsys, *args, "--prompts", tmp_path / "p.jsonl", "--batch_size", 2).splitlines()
    assert sorted(again) == sorted(map(json.dumps, rows))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", b"a\xffb", "is not UTF-8 text"),
        ("p.txt", b"", "line 1 is empty"),
        ("p.txt", b"a\n\nb\n", "line 2 is empty"),
        ("p.jsonl", b"a\n", ":1: is not JSON"),
        ("p.jsonl", b"[" * 100_000, "p.jsonl:1: is not JSON (maximum recursion"),
        ("p.jsonl", b'{"prompt": ' + b"1" * 5000 + b"}", "p.jsonl:1: is not JSON (Exceeds the limit"),
        ("p.jsonl", b'{"prompt": "a"}\n\n', "line 2 is empty"),
        ("p.jsonl", b'{"prompt": 3}\n', "line 1 must be an object with a text"),
        ("none", None, "there is no file "),
    ],
)
def test_wrong_files_of_prompts_are_refused(name, content, said, tmp_path, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "--checkpoint", "none.ckpt", "--prompts", str(tmp_path / name)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt=a\udcff"], "is not UTF-8"),
        (["--prompt=a", "--max_new_tokens=0"], "at least 1"),
        (["--prompt=a", "--temperature=1e-45"], "temperature must be 0 (most likely token) or"),
        (["--prompt=a", "--temperature=nan"], "temperature"),
        (["--prompt=a", "--seed=99999999999999999999"], "seed must be at least 0, and at most 18,446"),
        (["--prompt=a", "--seed=-1"], "seed must be at least 0, not -1"),
        (["--prompt=a", "--temperature=0", "--seed=0"], "seed has no effect at temperature 0: leave it out"),
        (["--prompt=a", "--top_p=0"], "top_p must lie in 0..1, 0 excluded"),
        (["--prompt=a", "--stop="], "stop text is empty"),
        (["--prompt=a", "--stop=\udcff"], "the text '--stop=\\udcff' is not UTF-8"),
        (["--prompt=a", "--prompts=b"], "give --prompt with a text, or --prompts"),
        ([], "give --prompt with a text, or --prompts"),
    ],
)
def test_generate_refuses(checkpoint, capsys, option, said):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "--checkpoint", str(checkpoint), *option])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said in error
    assert error.count("\n") == 1


def test_nothing_is_printed_of_what_cannot_be_generated(checkpoint, capsys, monkeypatch):
    def refuse(*_, **__):
        raise UserError("the model has 8 positions")
        yield

    monkeypatch.setattr("seqarch.experiment.load.stream", refuse)
    with pytest.raises(SystemExit):
        cli.main(["generate", "--checkpoint", str(checkpoint), "--prompt", "The"])
    assert capsys.readouterr().out == ""


def test_generate_says_which_package_of_a_mixer_is_missing(checkpoint, tmp_path, capsys):
    content = torch.load(checkpoint, weights_only=True)
    content["hyper_parameters"]["mixers"] = {"mine": {"class_path": "no_such_package.Mine"}}
    torch.save(content, tmp_path / "mine.ckpt")
    with pytest.raises(SystemExit):
        cli.main(["generate", "--checkpoint", str(tmp_path / "mine.ckpt"), "--prompt", "a"])
    said = capsys.readouterr().err
    assert (
        "mine.ckpt cannot be built here: model.mixers.mine: 'no_such_package.Mine' belongs neither to seqarch nor to an"
        in said
    )
    assert said.endswith("add --allow_code no_such_package\n")
    assert said.count("\n") == 1

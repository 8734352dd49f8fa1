"""What `seqarch exam` says of a wrong command line, and how it reads values."""

import pytest

from seqarch import cli
from seqarch.errors import UserError
from seqarch.experiment.tree import read_text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--mixer", "Top1Chnk"], "unknown mixer or recipe 'Top1Chnk': did you mean Top1Chunk"),
        ([], "missing --mixer"),
        (["--mixer"], "--mixer needs a value"),
        (["--mixer", "Top1Chunk", "--mixer.chunk_size"], "--mixer.chunk_size needs a value"),
        (
            ["--mixer", "Top1Chunk", "--mixer.chunk_sise", "3"],
            "Top1Chunk has no option 'chunk_sise': did you mean chunk",
        ),
        (["--mixer", "Top1Chunk", "--mixer.chunk_size", "many"], "chunk_size is many: expected a whole number"),
        (
            ["--mixer", "Top1Chunk", "--mixer.chunk_size", "["],
            "model.mixers.attention.chunk_size is [: expected a whole number",
        ),
        (["--mixer", "Top1Chunk", "--mixer.n_heads", "7"], "Top1Chunk-n_heads=7: n_heads=7 does not divide d_model=64"),
        (["--mixer", "Top1Chunk", "rwkv7", "--mixer.n_heads", "2"], "--mixer.OPTION belongs to one mixer"),
        (["--mixer", "transformer_pp"], "'transformer_pp' and 'transformer_pp' are one model"),
        (["--mixer", "Attention"], "'Attention' and 'transformer_pp' are one model: name another --mixer"),
        (["--mixer", "zzz", "--mixer", "nope.yaml"], "'zzz' (`seqarch mixers` and `seqarch recipes` list all)"),
        (["--mixer", "Top1Chunk", "--workers", "0", "--data", "nowhere"], "--workers must lie in 1..1000, not 0"),
        (["--mixer", "Top1Chunk", "--trainer.devices", "0"], "trainer.devices is 0, but there are "),
        (["--mixer", "Mamba2", "mamba2"], "'mamba2' and 'Mamba2' are one model"),
        (["--mixer", "nope.yaml"], "there is no file 'nope.yaml'"),
        (["--mixer", "Top1Chunk", "--against", "Transfomer"], "did you mean transformer or"),
        (["--mixer", "Top1Chunk", "--size", "large"], "unknown size 'large'"),
        (["--mixer", "Top1Chunk", "--seeds", "0"], "--seeds must lie in 1..1000, not 0"),
        (["--mixer", "Top1Chunk", "--seeds", "1001"], "--seeds must lie in 1..1000, not 1001"),
        (["--mixer", "Top1Chunk", "--workers", "9999999"], "--workers must lie in 1..1000, not"),
        (["--mixer", "Top1Chunk", "--seeds", "x"], "seeds is x: expected a whole number"),
        (["--mixer", "Top1Chunk", "--sedes", "1"], "unknown option --sedes: did you mean --seeds?"),
        (["--mixer", "Top1Chunk", "--data", "nowhere"], "there is no folder 'nowhere': --data names one"),
        (["--mixer", "Top1Chunk", "--data", "."], "has neither shards nor text of docs, "),
        (["--mixer", "Top1Chunk", "--model.d_modl", "3"], "model has no option 'd_modl': did you mean d_model?"),
        (["--mixer", "Top1Chunk", "--trainer.max_steps", "24"], "(below trainer.max_steps) must lie in 0..23, not 48"),
        (["--mixer", "Top1Chunk", "--data.micro_batch_size", "3"], "=3 does not divide data.sequences_per_step=8"),
        (["--mixer", "Top1Chunk", "--model.mixers", "{}"], "--model.mixers: the exam compares this"),
        (["--mixer", "Top1Chunk", "--model.loops", "2"], "--model.loops: the exam compares this"),
        (["--mixer", "Top1Chunk", "--model.norm", "layernorm"], "--model.norm: the exam compares this"),
        (["--mixer", "Top1Chunk", "--ood_loss.at", "[2.0]"], "ood_loss.at must lie in 0..1, 0 excluded, not 2.0"),
    ],
)
def test_wrong_command_line(args, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["exam", *args])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("seqarch: ")]
    assert stop.value.code == 2
    assert len(lines) == 1
    assert said in lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("[1e-3, .5]", [0.001, 0.5]),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("{a: 1e2}", {"a": 100}),
    ],
)
def test_a_value_is_read_as_in_a_recipe(text, value):
    assert read_text(text).plain() == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nests too deeply to be a configuration"),
        ("- " * 100_000, "nests too deeply to be a configuration"),
        ("&a [*a]", "stands for more than 20,000 entries: aliases in it repeat each other"),
        ("1" * 5000, "a number has 5,000 digits, more than 300"),
    ],
)
def test_a_value_that_no_recipe_may_hold_is_refused_in_a_short_line(text, said):
    with pytest.raises(UserError, match=f"^a value of the command line(:1:)? {said}$"):
        read_text(text)

"""Checkpoints that changed on disk are refused in one line."""

import zipfile

import pytest
import torch

from seqarch.errors import UserError
from seqarch.training.checkpoint import check_optimizer, read_checkpoint
from seqarch.training.integrity import check_checkpoint, damage, seal
from seqarch.training.weights import write_tensors


@pytest.fixture
def checkpoint(tmp_path):
    """Writes the checkpoint of a step, with or without a checksum of the whole."""

    def write(step, sealed=True):
        path = tmp_path / f"step_{step:08d}.ckpt"
        weights = {f"w{i}": torch.arange(500) + i for i in range(3)}
        said = {"seqarch": {"tokenizer": "byte"}, "hyper_parameters": {}, "global_step": step}
        torch.save({"state_dict": weights, **said}, path)
        if sealed:
            seal(path)
        return path

    return write


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_whole_checkpoint_is_read(checkpoint, sealed):
    path = checkpoint(1, sealed)
    assert damage(path) is None
    assert torch.equal(read_checkpoint(path)["state_dict"]["w2"], torch.arange(500) + 2)


def test_every_byte_counts(checkpoint):
    """In records, headers, the directory, padding and the checksum itself."""
    path = checkpoint(1)
    size = path.stat().st_size
    for position in [*range(0, size, 97), *range(size - 100, size)]:
        flip(path, position)
        assert damage(path), position
        flip(path, position)
    assert damage(path) is None


def test_a_record_of_a_checkpoint_without_a_checksum_of_the_whole(checkpoint):
    path = checkpoint(1, sealed=False)
    flip(path, path.read_bytes().index((499).to_bytes(8, "little")))
    with pytest.raises(UserError, match=r"step_00000001\.ckpt is damaged: its content differs from its checksums"):
        read_checkpoint(path)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("kept", [0, 10, 1000, -1000, -1])
def test_a_checkpoint_cut_short(checkpoint, sealed, kept):
    path = checkpoint(1, sealed)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"is damaged: .*; restore it, or name another$"):
        read_checkpoint(path)


def test_a_file_of_weights_is_whole_or_cut_short(checkpoint, tmp_path):
    path = tmp_path / "weights.safetensors"
    write_tensors(path, read_checkpoint(checkpoint(1))["state_dict"])
    check_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"is damaged: weights\.safetensors is cut short"):
        check_checkpoint(path)


def test_the_newest_whole_one_is_named(checkpoint):
    first, second, third = (checkpoint(step) for step in (1, 2, 3))
    flip(second, 500)
    third.write_bytes(third.read_bytes()[:-1000])
    with pytest.raises(UserError, match=f"{third} is damaged: .* the newest whole one is {first}: remove the newer"):
        check_checkpoint(third)


def test_a_run_without_checkpoints_is_not_called_something_else(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"a run without checkpoints, as in an exam: name a checkpoint"):
        read_checkpoint(tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(UserError, match=f"{tmp_path} is neither checkpoint nor run"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(("cut", "method"), [(7, zipfile.ZIP_STORED), (0, zipfile.ZIP_DEFLATED)], ids=["cut", "packed"])
def test_records_that_do_not_hold_their_tensors(checkpoint, cut, method, sealed):
    """PyTorch would read what follows a short record, and a packed one as if it were numbers."""
    path = checkpoint(1, sealed=False)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    last = max(name for name in records if "/data/" in name)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(name, content[: len(content) - cut * (name == last)])
    if sealed:
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = b""
        seal(path)
    with pytest.raises(UserError, match="its tensors are cut short" if cut else "its records are compressed"):
        read_checkpoint(path)


def stepped(kind, **options):
    """The parameters of a layer, and an optimizer of them after a step."""
    layer = torch.nn.Linear(3, 4)
    layer(torch.ones(2, 3)).sum().backward()
    optimizer = kind(layer.parameters(), lr=0.1, **options)
    optimizer.step()
    return layer, optimizer.state_dict()


KINDS = [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adafactor]
SPOILED = {
    "another key": lambda state: state["state"][0].update(more=torch.zeros(4, 3)),
    "a key less": lambda state: state["state"][1].popitem(),
    "dtype": lambda state: state["state"][0].update({name: each.half() for name, each in state["state"][0].items()}),
    "shape": lambda state: state["state"][0].update({name: each[None] for name, each in state["state"][0].items()}),
    "option": lambda state: state["param_groups"][0].update(maximize=True),
    "another option": lambda state: state["param_groups"][0].update(more=1),
    "a parameter less": lambda state: state["param_groups"][0]["params"].pop(),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_an_optimizer_is_that_of_the_recipe(kind, spoil):
    layer, state = stepped(kind)
    check_optimizer(state, kind(layer.parameters(), lr=0.2))
    spoil(state)
    with pytest.raises(UserError, match="the checkpoint's state of the optimizer is of another class or damaged"):
        check_optimizer(state, kind(layer.parameters(), lr=0.2))

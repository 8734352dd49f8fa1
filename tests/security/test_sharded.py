"""Folders of other people in the place of a checkpoint run no code, and are refused before a tensor is read."""

import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from seqarch.training.checkpoint import read_tensors
from seqarch.training.sharded.folder import index_text, split
from seqarch.training.sharded.storage import write_tensors

SHARD = "shard_00000.safetensors"


def sealed(folder, change):
    """Change the index of a folder, with a checksum that fits."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    text = index_text(index["files"], index["tensors"], index["content"])
    (folder / "index.json").write_text(text)


def rewritten(folder, tensors, file=SHARD):
    save_file(tensors, folder / file)
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    sealed(folder, lambda index: index["files"].update({file: digest}))


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


class Pickled:
    def __reduce__(self):
        return os.system, ("touch PWN",)


def huge(folder):
    """A header that claims more numbers than the file has."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (folder / SHARD).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def wide(folder):
    """No rows, of a width that no memory holds."""
    tensors = {**load_file(folder / SHARD), "state_dict/lm.norm.weight": torch.empty(0, 2**60)}
    rewritten(folder, tensors)


def in_two(folder, first, second):
    """Two files with rows of the same tensors, of these shapes."""
    tensors = load_file(folder / SHARD)
    rewritten(folder, {name: torch.zeros(second) for name in tensors}, "shard_00001.safetensors")
    rewritten(folder, {name: torch.zeros(first) for name in tensors})
    sealed(folder, lambda i: i.update(tensors={name: [SHARD, "shard_00001.safetensors"] for name in tensors}))


@pytest.fixture
def folder(trained, tmp_path):
    """A good checkpoint as a folder of one process."""
    (good,) = (trained / "checkpoints").glob("*.ckpt")
    path, tensors = tmp_path / "theirs.ckpt", {}
    path.mkdir()
    whole = read_tensors(good)
    for state in whole["optimizer_states"]:
        state["state"] = {str(number): each for number, each in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [str(number) for number in group["params"]]
    content = {name: split(each, name, tensors) for name, each in whole.items()}
    digest = write_tensors(path / SHARD, tensors)
    (path / "index.json").write_text(index_text({SHARD: digest}, {name: [SHARD] for name in tensors}, content))
    return path


def test_a_good_folder_is_read(folder, trained, capsys):
    from seqarch import cli, load

    torch.testing.assert_close(load(folder)[0].state_dict(), load(trained)[0].state_dict(), rtol=0, atol=0)
    cli.run(["checkpoint", "check", str(folder)])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda f: flip(f / SHARD, -5), f"the content of {SHARD} differs from its checksum"),
        (lambda f: flip(f / SHARD, 3), f"{SHARD} is cut short or no safetensors file"),
        (lambda f: os.truncate(f / SHARD, 1000), f"{SHARD} is cut short or no safetensors file"),
        (lambda f: flip(f / "index.json", 25), "the content of index.json differs from its checksum"),
        (lambda f: (f / SHARD).unlink(), f"{SHARD} is missing"),
        (lambda f: (f / ".metadata").write_bytes(pickle.dumps(Pickled())), ".metadata does not belong to a checkpoint"),
        (lambda f: (f / "index.json").write_bytes(pickle.dumps(Pickled())), "index.json is not UTF-8 text"),
        (lambda f: (f / "index.json").write_text("[" * 100_000), "index.json:1: is not JSON (maximum recursion"),
        (lambda f: (f / "index.json").write_text("[]"), "index.json is not that of a checkpoint"),
        (lambda f: sealed(f, lambda i: i.update(files=[])), "index.json is not that of a checkpoint"),
        (lambda f: sealed(f, lambda i: i["files"].update({"../x": "0"})), "../x is missing"),
        (lambda f: sealed(f, lambda i: i["files"].update({"/etc/passwd": "0"})), "/etc/passwd is missing"),
        (lambda f: sealed(f, lambda i: i["tensors"].update(x=["../x"])), "hold other tensors than index.json names"),
        (lambda f: sealed(f, lambda i: i["tensors"].update(x=[SHARD])), "hold other tensors than index.json names"),
        (lambda f: sealed(f, lambda i: i["content"].update(x={"$tensor": "y"})), "is not that of a checkpoint: 'y'"),
        (lambda f: sealed(f, lambda i: i["content"].update(x={"$pairs": [[[], 1]]})), "is not that of a checkpoint"),
        (lambda f: sealed(f, lambda i: i["content"].update(optimizer_states=[3])), "is not that of a checkpoint"),
        (lambda f: sealed(f, lambda i: i["content"].pop("hyper_parameters")), "hyper_parameters is None"),
        (huge, f"{SHARD} is cut short or no safetensors file"),
        (wide, "size mismatch for lm.norm.weight"),
        (lambda f: in_two(f, (2, 7, 3), (2, 7, 4)), "do not fit each other"),
        (lambda f: in_two(f, (2,), ()), "do not fit each other"),
    ],
    ids=range(22),
)
def test_a_hostile_folder(refused, folder, harm, said):
    harm(folder)
    for command in (["generate", "--prompt", "a", "--checkpoint"], ["checkpoint", "merge"]):
        if harm is wide and command[0] == "checkpoint":
            continue  # a file may hold it as well; who builds the model refuses it
        if "hyper_parameters" in said and command[0] == "checkpoint":
            continue
        assert said in refused(*command, folder)


def test_links_and_fifos(refused, folder, tmp_path):
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)
    assert "is neither a file nor a folder" in refused("generate", "--prompt", "a", "--checkpoint", folder)
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()
    assert f"{SHARD} is cut short or no" in refused("generate", "--prompt", "a", "--checkpoint", folder)


def test_damage_names_the_folder_before(refused, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "step_00000001.ckpt")
    shutil.move(folder, tmp_path / "step_00000002.ckpt")
    flip(tmp_path / "step_00000002.ckpt" / SHARD, -5)
    said = refused("checkpoint", "check", tmp_path / "step_00000002.ckpt")
    assert f"the newest whole one is {tmp_path}/step_00000001.ckpt: remove the newer ones" in said

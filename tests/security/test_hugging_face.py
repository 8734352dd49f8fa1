"""A folder of a model from another person runs nothing, and reads nothing outside of itself."""

import json
import pickle

import pytest
import torch

import seqarch
from seqarch.errors import UserError

pytest.importorskip("transformers")

from safetensors.torch import save_file

from seqarch.hf.imports import import_model
from tests.hf.conftest import checkpoint, exported  # noqa: F401 - a fixture
from tests.hf.test_model import MIXERS, loaded


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def folder(exported):  # noqa: F811
    return exported(MIXERS["Attention"]).folder


def refused(folder, out, said):
    with pytest.raises(UserError, match=said):
        import_model(folder, out)
    assert not out.exists()


def test_code_in_the_folder_does_not_run(folder, tmp_path):
    made = tmp_path / "made"
    (folder / "modeling_seqarch.py").write_text(f"open({str(made)!r}, 'w')")
    loaded(folder)
    import_model(folder, tmp_path / "run")
    assert not made.exists()


@pytest.mark.parametrize("name", ["os.system", "subprocess.Popen", "seqarch.plugins.resolve", "builtins.eval"])
def test_names_in_config_json_become_no_code(name, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    made = tmp_path / "made"
    spec = {"class_path": name, "init_args": {"command": f"touch {made}"}}
    config["seqarch"]["hyper_parameters"]["mixers"]["mixer"] = spec
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"belongs neither|is a function"):
        loaded(folder)
    refused(folder, tmp_path / "run", r"belongs neither|is a function")
    assert not made.exists()


@pytest.mark.parametrize("content", [None, [], {"hyper_parameters": 1}, {"seqarch": {"tokenizer": 3}}])
def test_a_strange_config_json_is_one_sentence(content, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["seqarch"] = content
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, tmp_path / "run", "not a checkpoint of seqarch")


def test_pickles_are_not_loaded(folder, tmp_path):
    made = tmp_path / "made"
    (folder / "model.safetensors").unlink()
    torch.save({"lm.embedding.weight": Touch(made)}, folder / "pytorch_model.bin")
    refused(folder, tmp_path / "run", r"it asks for|is not a checkpoint")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(made)))
    refused(folder, tmp_path / "run", "damaged")
    assert not made.exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "sub/../../outside.safetensors"])
def test_an_index_names_files_of_its_folder_only(name, folder, tmp_path):
    save_file({"lm.norm.weight": torch.zeros(32)}, tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm.norm.weight": name}}))
    refused(folder, tmp_path / "run", "leads out of the folder")


def test_a_link_leads_to_the_cache_of_the_hub_at_most(folder, tmp_path):
    weights = folder / "model.safetensors"
    outside = tmp_path / "outside.safetensors"
    weights.rename(outside)
    weights.symlink_to(outside)
    refused(folder, tmp_path / "run", "leads out of the folder")
    weights.unlink()
    snapshot = tmp_path / "models--a--b/snapshots/1"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    blobs = tmp_path / "models--a--b/blobs"
    blobs.mkdir()
    outside.rename(blobs / "0a")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a")
    assert seqarch.load(import_model(snapshot, tmp_path / "run"))[1].name == "byte"


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"{}", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_a_damaged_safetensors_file_is_one_sentence(content, tmp_path):
    path = checkpoint(tmp_path, MIXERS["Attention"])
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged or not a safetensors file"):
        seqarch.load(path)

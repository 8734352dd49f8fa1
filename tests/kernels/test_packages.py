"""Packages of other people's kernels: found without an import, refused where they compute wrongly or do not load."""

import contextlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import packages
from seqarch.kernels.packages import check_gated_gradients
from seqarch.kernels.selective_scan import op as selective_scan
from seqarch.kernels.ssd import op as ssd


def test_packages_are_found_without_importing_them():
    assert packages.FOUND.keys() == {*packages.INSTALL, "tilelang"}
    assert packages.is_installed("triton") == (importlib.util.find_spec("triton") is not None)


@pytest.mark.parametrize(
    ("version", "major", "refused"), [("3.6.0", 9, True), ("3.7.1", 9, False), ("3.6.0", 8, False)]
)
def test_triton_with_wrong_gradients_is_refused(monkeypatch, version, major, refused):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setitem(packages.FOUND, "tilelang", False)
    message = r'wrong gradients .* pip install "fla-core" "triton>=3.7.1"'
    with pytest.raises(UserError, match=message) if refused else contextlib.nullcontext():
        check_gated_gradients(torch.device("cuda"))


def test_mamba2_by_fla_refuses_them_before_it_runs(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setitem(packages.FOUND, "tilelang", False)
    x, B = torch.randn(1, 4, 2, 8, requires_grad=True), torch.randn(1, 4, 1, 16)
    with pytest.raises(UserError, match="wrong gradients"):
        ssd.by_simple_gla(x, -torch.rand(1, 4, 2), B, B, None, None)


def test_a_mamba_ssm_whose_extension_does_not_load_is_said_with_the_command(monkeypatch, tmp_path):
    package = tmp_path / "mamba_ssm"
    package.mkdir()
    (package / "__init__.py").write_text("import selective_scan_cuda_for_another_torch\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
        monkeypatch.delitem(sys.modules, name)
    inputs = torch.randn(1, 4, 5), torch.rand(1, 4, 5), -torch.rand(5, 3), torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    x = torch.randn(1, 4, 2, 5)
    with pytest.raises(UserError, match=r"cannot be imported: .*pip install mamba-ssm.*for_another_torch"):
        selective_scan.by_mamba_ssm(*inputs, None, None, None, None)
    with pytest.raises(UserError, match=r"cannot be imported: .*pip install mamba-ssm.*for_another_torch"):
        ssd.by_mamba_ssm(x, torch.rand(1, 4, 2), None, *inputs[3:], None, None)


@pytest.fixture
def fake_mamba_ssm(monkeypatch):
    """Kernels of mamba-ssm with two tile sizes, and its mode."""
    modules = {}
    for name in ("ssd_bmm", "ssd_chunk_state", "ssd_state_passing", "ssd_chunk_scan", "ssd_combined"):
        modules[name] = SimpleNamespace(kernel=SimpleNamespace(configs=[64, 32]), mamba_chunk_scan_combined=print)
        monkeypatch.setitem(sys.modules, f"mamba_ssm.ops.triton.{name}", modules[name])
    modes = []
    mode = SimpleNamespace(set_deterministic_mode=modes.append, autotune_configs=lambda configs: [min(configs)])
    monkeypatch.setitem(sys.modules, "mamba_ssm.utils.determinism", mode)
    ssd.deterministic_chunk_scan.cache_clear()
    yield modules, modes
    ssd.deterministic_chunk_scan.cache_clear()


def test_mamba_ssm_adds_in_one_order_with_one_tile_size(fake_mamba_ssm):
    modules, modes = fake_mamba_ssm
    assert ssd.deterministic_chunk_scan() is print
    assert modes == [True]
    assert all(module.kernel.configs == [32] for module in modules.values())


@pytest.mark.usefixtures("fake_mamba_ssm")
def test_a_mamba_ssm_without_a_deterministic_mode_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm.utils.determinism", None)
    with pytest.raises(UserError, match="needs a mamba-ssm with a deterministic mode"):
        ssd.deterministic_chunk_scan()

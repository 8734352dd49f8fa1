"""The choice of a backend, and recurrences over packed documents."""

from __future__ import annotations

import contextlib
import importlib.util
import sys

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import recurrent
from seqarch.kernels.recurrent import check_gated_gradients, choose_backend, each_document
from seqarch.kernels.selective_scan.mamba_ssm import scan
from seqarch.kernels.ssd.fla import ssd_fla
from seqarch.kernels.ssd.mamba_ssm import ssd_mamba_ssm

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PACKAGES = {"fla": "fla", "own": "triton"}


@pytest.fixture
def installed(monkeypatch):
    """Sets what counts as installed."""

    def install(*packages):
        for package in recurrent.FOUND:
            monkeypatch.setitem(recurrent.FOUND, package, package in packages)

    return install


def choose(requested, device, **options):
    return choose_backend(requested, device, PACKAGES, order=("fla", "own"), **options)


def test_the_reference_runs_where_asked_for_and_on_the_cpu(installed):
    installed("fla", "triton")
    assert choose("auto", CPU) == "reference"
    assert choose("reference", CUDA) == "reference"


def test_auto_takes_the_first_installed_on_cuda(installed):
    installed("triton")
    assert choose("auto", CUDA) == "own"
    installed("triton", "fla")
    assert choose("auto", CUDA) == "fla"


def test_what_is_asked_for_runs_or_is_refused(installed):
    installed("fla")
    assert choose("fla", CUDA) == "fla"
    with pytest.raises(UserError, match="needs tensors on a CUDA device, not on cpu: use 'reference'"):
        choose("fla", CPU)
    with pytest.raises(UserError, match="'own' is not installed: pip install triton"):
        choose("own", CUDA)
    with pytest.raises(UserError, match="unknown backend"):
        choose("flash", CUDA)


def test_packages_are_found_without_importing_them():
    assert recurrent.FOUND.keys() == {*recurrent.INSTALL, "tilelang"}
    assert recurrent.is_installed("triton") == (importlib.util.find_spec("triton") is not None)


def test_nothing_installed_is_said_with_the_commands(installed):
    installed()
    with pytest.raises(UserError, match=r'no backend for CUDA .* pip install "fla-core" .*; or pip install triton'):
        choose("auto", CUDA)


def test_the_interpreter_takes_triton_alone_to_the_cpu(installed):
    installed("fla", "triton")
    options = {"packages": {"fla": "fla", "triton": "triton"}, "order": ("triton",), "interpreted": True}
    assert choose_backend("triton", CPU, **options) == "triton"
    with pytest.raises(UserError, match="CUDA device"):
        choose_backend("fla", CPU, **options)


@pytest.mark.parametrize(
    ("version", "major", "refused"), [("3.6.0", 9, True), ("3.7.1", 9, False), ("3.6.0", 8, False)]
)
def test_triton_with_wrong_gradients_is_refused(monkeypatch, version, major, refused):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setitem(recurrent.FOUND, "tilelang", False)
    message = r'wrong gradients .* pip install "fla-core" "triton>=3.7.1"'
    with pytest.raises(UserError, match=message) if refused else contextlib.nullcontext():
        check_gated_gradients(torch.device("cuda"))


def test_mamba2_by_fla_refuses_them_before_it_runs(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setitem(recurrent.FOUND, "tilelang", False)
    x, B = torch.randn(1, 4, 2, 8, requires_grad=True), torch.randn(1, 4, 1, 16)
    with pytest.raises(UserError, match="wrong gradients"):
        ssd_fla(x, -torch.rand(1, 4, 2), B, B, None, None)


def running_sum(x, y, state):
    """The smallest recurrence: outputs and final state are sums of x (and of y where given)."""
    x = x if y is None else x + y
    start = torch.zeros_like(x[:, 0]) if state is None else state
    o = x.cumsum(dim=1) + start[:, None]
    return o, o[:, -1]


def borders(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_each_document_starts_from_its_own_state():
    x = torch.arange(6.0).view(1, 6, 1)
    o, final = each_document(running_sum, (x, None), None, borders(0, 2, 6))
    assert o.flatten().tolist() == [0, 1, 2, 5, 9, 14]
    assert final.tolist() == [[1], [14]]
    o, final = each_document(running_sum, (x, x), torch.tensor([[10.0], [100.0]]), borders(0, 2, 6))
    assert o.flatten().tolist() == [10, 12, 104, 110, 118, 128]
    assert final.tolist() == [[12], [128]]


def test_an_empty_document_keeps_its_state():
    x = torch.ones(1, 3, 1)
    initial = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    o, final = each_document(running_sum, (x, None), initial, borders(0, 0, 2, 2, 3))
    assert o.flatten().tolist() == [3, 4, 5]
    assert final.tolist() == [[1], [4], [3], [5]]
    _, final = each_document(running_sum, (x, None), None, borders(0, 0, 2, 2, 3))
    assert final.tolist() == [[0], [2], [0], [1]]


def test_documents_have_the_gradients_that_they_have_alone():
    x = torch.randn(1, 5, 2, requires_grad=True)
    initial = torch.randn(2, 2, requires_grad=True)
    o, final = each_document(running_sum, (x.square(), None), initial, borders(0, 3, 5))
    grad_x, grad_initial = torch.autograd.grad(o.sum() + final.sum(), (x, initial))
    count = torch.tensor([4.0, 3, 2, 3, 2])[:, None]
    torch.testing.assert_close(grad_x[0], 2 * x[0].detach() * count)
    torch.testing.assert_close(grad_initial, torch.tensor([[4.0, 4], [3, 3]]))


def test_borders_that_do_not_cover_the_row_are_refused():
    x = torch.ones(1, 3, 1)
    for wrong in (borders(0, 2), borders(1, 3), borders(0, 3, 2, 3)):
        with pytest.raises(UserError, match="must rise from 0 to T = 3"):
            each_document(running_sum, (x, None), None, wrong)


def test_a_mamba_ssm_whose_extension_does_not_load_is_said_with_the_command(monkeypatch, tmp_path):
    package = tmp_path / "mamba_ssm"
    package.mkdir()
    (package / "__init__.py").write_text("import selective_scan_cuda_for_another_torch\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
        monkeypatch.delitem(sys.modules, name)
    inputs = torch.randn(1, 4, 5), torch.rand(1, 4, 5), -torch.rand(5, 3), torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    x = torch.randn(1, 4, 2, 5)
    with pytest.raises(UserError, match=r"cannot be imported .*for_another_torch.*pip install mamba-ssm"):
        scan(*inputs, None, None, None, None)
    with pytest.raises(UserError, match=r"cannot be imported .*for_another_torch.*pip install mamba-ssm"):
        ssd_mamba_ssm(x, torch.rand(1, 4, 2), None, *inputs[3:], None)

"""In which dtype parameters reach the forward pass under FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from seqarch.mixers.attention import Attention
from seqarch.mixers.mamba1 import Mamba1
from seqarch.model import SequenceLM
from seqarch.model.feed_forward import GeGLU
from seqarch.training import fsdp


@pytest.fixture
def mesh(tmp_path):
    """One process with its group, as FSDP2 wants it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    dist.destroy_process_group()


def build():
    torch.manual_seed(0)
    mixers = {"attention": lambda *place: Attention(*place, n_heads=2), "mamba": lambda *place: Mamba1(*place)}
    return SequenceLM(50, 32, 2, mixers, pattern=["attention", "mamba"], feed_forward=GeGLU, learned_positions=16)


def seen_in_forward(lm, x):
    """The loss, and the parameters as the forward pass of their module sees them."""
    found = {}

    def record(name):
        def hook(module, inputs, outputs):
            found.update({f"{name}.{key}": p.detach().clone() for key, p in module.named_parameters(recurse=False)})

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in lm.named_modules() if name]
    with torch.autocast("cpu", torch.bfloat16):
        loss = lm(x[:, :-1], x[:, 1:])
    for handle in handles:
        handle.remove()
    return loss, found


def test_what_mixers_use_in_float32_is_not_rounded(mesh, monkeypatch):
    x = torch.randint(0, 50, (2, 13))
    expected, alone = seen_in_forward(build(), x)
    policy = fsdp.mixed_precision
    monkeypatch.setattr(fsdp, "mixed_precision", lambda module, device_type: policy(module, "cuda"))
    lm = build()
    fsdp.shard(lm, mesh)
    loss, found = seen_in_forward(lm, x)
    assert found.keys() == alone.keys() == {name for name, _ in lm.named_parameters()}
    for name, parameter in found.items():
        if name.startswith("blocks.1."):
            assert parameter.equal(alone[name]), name
        else:
            assert parameter.equal(alone[name].bfloat16()), name
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in lm.parameters())


def test_on_a_cpu_nothing_is_rounded():
    assert fsdp.mixed_precision(build(), "cpu").param_dtype is None

"""Two processes under FSDP2 train every mixer like one: the dtype of each gathered parameter, losses, small updates."""

import contextlib
import functools
import inspect
import multiprocessing
import os
import socket
import types
from typing import Any

import filelock
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from seqarch.errors import UserError
from seqarch.mixers.registry import load_mixer, mixer_entries
from seqarch.model import SequenceLM
from seqarch.model.feed_forward import RWKVChannelMix
from seqarch.training import LanguageModel, fsdp
from tests import processes
from tests.training.test_added_losses import build as with_added_losses

MIXERS = sorted(entry.name for entry in mixer_entries() if entry.package == "seqarch")
STEPS = 2
RATE = 1e-6
"""So small that bf16 would lose the updates of most parameters."""
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DEVICES = [pytest.param("cpu", marks=pytest.mark.commands), pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])]


def build(name, **options):
    mixer = load_mixer(name)
    heads = {"n_heads": 2} if "n_heads" in inspect.signature(mixer).parameters else {}
    torch.manual_seed(0)
    mixers = {"mixer": functools.partial(mixer, **heads)}
    lm = SequenceLM(50, 32, 1, mixers, feed_forward=RWKVChannelMix, **options)
    for parameter in lm.blocks.parameters():  # no output starts at zero, so all parameters have gradients
        parameter.data += 0.02 * torch.randn_like(parameter)
    return lm


def train(lm, rows):
    """Loss and gradient norm at each step; the weights before the last step, and as its forward pass saw them."""
    optimizer = torch.optim.AdamW(lm.parameters(), lr=RATE, fused=True)
    found, weights, seen = [], {}, {}

    def see(module, inputs, outputs):
        seen.update({name: parameter.detach().clone() for name, parameter in lm.named_parameters()})

    lm.blocks[0].mixer_norm.register_forward_hook(see)
    for _ in range(STEPS):
        weights = {name: whole(parameter).clone() for name, parameter in lm.named_parameters()}
        total = torch.zeros((), device=rows.device)
        for row in rows.split(1):
            with torch.autocast(row.device.type, torch.bfloat16):
                loss = lm(row[:, :-1], row[:, 1:]) / len(rows)
            loss.backward()
            total += loss.detach()
        norm = whole(torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm))
    return found, weights, seen


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class Gathers(TorchDispatchMode):
    """Counts the all-gathers within it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.c10d._allgather_base_.default
        return func(*args, **(kwargs or {}))


def accumulate(lm, rows, strategy=None, **options):
    """The gradients of a step, one micro-batch per row; `strategy` keeps all but the last from synchronising."""
    for number, row in enumerate(rows.split(1), 1):
        with strategy.block_backward_sync() if strategy and number < len(rows) else contextlib.nullcontext():
            with torch.autocast(row.device.type, torch.bfloat16):
                loss = lm(row[:, :-1], row[:, 1:], **options) / len(rows)
            loss.backward()
    return {name: whole(parameter.grad) for name, parameter in lm.named_parameters()}


def strategy_of(lm):
    strategy = fsdp.FSDP2()
    strategy._lightning_module = types.SimpleNamespace(lm=lm)  # pyright: ignore[reportAttributeAccessIssue]
    return strategy


def run(rank, kind, port, path):
    """One of two processes: results for each mixer when sharded and then, in the first process, with both halves."""
    torch.set_num_threads(1)
    device = torch.device(f"cuda:{rank}" if kind == "cuda" else kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh(kind, (2,), mesh_dim_names=("data_parallel",))
    tokens = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(1)).to(device)
    results = {}
    for name in MIXERS:
        lm = build(name).to(device)
        if name == "RWKV7":
            lm.checkpoint_activations()
        fsdp.shard(lm, mesh, torch.bfloat16)
        found, weights, seen = train(lm, tokens[rank : rank + 1])
        for loss, _ in found:
            dist.all_reduce(loss.div_(2))
        results[name] = found, weights, seen
    rows = torch.randint(0, 50, (6, 13), generator=torch.Generator().manual_seed(1)).to(device)
    lm = build("Mamba2").to(device)
    fsdp.shard(lm, mesh, torch.bfloat16)
    with Gathers() as gathers:
        accumulated = accumulate(lm, rows[rank::2], strategy_of(lm))
    lm = with_added_losses().to(device)
    fsdp.shard(lm, mesh, torch.bfloat16)
    added = accumulate(lm, rows[rank::2], strategy_of(lm), added=1.0)
    dist.destroy_process_group()
    if rank == 0:
        saved: dict[str, tuple] = {
            name: (*found, train(build(name).to(device), tokens)[0]) for name, found in results.items()
        }
        saved["accumulated"] = gathers.count, accumulated, accumulate(build("Mamba2").to(device), rows)
        saved["added"] = added, accumulate(with_added_losses().to(device), rows, added=1.0)
        torch.save(saved, path)


@pytest.fixture(scope="module", params=DEVICES)
def results(request, tmp_path_factory):
    """What two processes find on a kind of device, once for all processes of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / f"fsdp_{request.param}"
    with filelock.FileLock(f"{path}.lock"):
        if not path.exists():
            path.touch()  # the tests of another process fail at once if these processes fail
            run_two(request.param, path)
    return torch.load(path, map_location="cpu")


def run_two(kind, path):
    """Train in two processes, the first of which saves what both found.

    With GPUs they are spawned: CUDA does not work in a process forked from one that has asked for them.
    """
    context = multiprocessing.get_context("spawn") if kind == "cuda" else processes.SERVER
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=run, args=(rank, kind, port, path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


@pytest.mark.parametrize("name", MIXERS)
def test_only_matrices_are_rounded(name, results):
    """The other parameters of a block, such as a decay, include the last small update."""
    _, weights, seen, _ = results[name]
    lm = build(name)
    matrices = {at for at, module in lm.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding)}
    start = dict(lm.named_parameters())
    assert seen.keys() == weights.keys() == start.keys()
    for key, weight in weights.items():
        rounded = key == "norm.weight" or key.rpartition(".")[0] in matrices
        assert seen[key].dtype == (torch.bfloat16 if rounded else torch.float32), key
        assert seen[key].equal(weight.bfloat16() if rounded else weight), key
        assert not weight.equal(start[key]), key


@pytest.mark.parametrize("name", MIXERS)
def test_two_processes_train_like_one(name, results):
    """Autocast rounds the same matrices in one process. The gradient of the tied embedding is a sum in bf16 here."""
    sharded, _, _, alone = results[name]
    for (loss, norm), (expected, expected_norm) in zip(sharded, alone, strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(norm, expected_norm, rtol=2**-9, atol=0)


def test_parameters_are_gathered_once_per_step(results):
    """The block's matrices, its other parameters, the rest. The last backward pass gathers the matrices again."""
    assert results["accumulated"][0] == 4


def test_three_micro_batches_are_summed_in_float32(results):
    """A sum in bf16 would differ by 2^-9 of the largest; gradients of the embedding and last norm are rounded to it."""
    _, found, expected = results["accumulated"]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        rounding = 2**-16 if name.startswith("blocks.") else 2**-7
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=rounding * gradient.abs().max().item(), msg=name)


def test_losses_that_mixers_add_are_in_the_gradients_of_two_processes(results):
    found, expected = results["added"]
    assert expected["blocks.0.mixer.guess.weight"].any()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=2**-7 * gradient.abs().max().item(), msg=name)


def test_the_blocks_are_no_container_that_fsdp2_refuses():
    """Before PyTorch 2.12, `fully_shard` refuses these classes, whatever they define."""
    assert not isinstance(build(MIXERS[0]).blocks, torch.nn.ModuleList | torch.nn.ModuleDict)


def test_weights_are_drawn_on_the_device_of_training(monkeypatch):
    """GPUs and processors draw other numbers, so a seed would give another model on several GPUs than on one."""
    monkeypatch.setattr(fsdp.FSDP2, "root_device", torch.device("meta"))
    with fsdp.FSDP2().tensor_init_context():
        assert torch.empty(1).is_meta


def test_only_the_last_micro_batch_exchanges_gradients():
    """Until then each device keeps whole parameters and adds up its own gradients. The sum covers all micro-batches."""
    rows = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(1)).split(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        lm = build("Mamba2")
        fsdp.shard(lm, init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",)), torch.float32)
        with strategy_of(lm).block_backward_sync():
            lm(rows[0][:, :-1], rows[0][:, 1:]).backward()
        assert not any(isinstance(parameter, DTensor) for parameter in lm.parameters())
        lm(rows[1][:, :-1], rows[1][:, 1:]).backward()
        assert all(isinstance(parameter, DTensor) for parameter in lm.parameters())
        found = {name: whole(parameter.grad) for name, parameter in lm.named_parameters() if parameter.grad is not None}
    finally:
        dist.destroy_process_group()
    whole_lm = build("Mamba2")
    for row in rows:
        whole_lm(row[:, :-1], row[:, 1:]).backward()
    expected = {name: parameter.grad for name, parameter in whole_lm.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_residual_stream_in_float32_is_the_same_when_sharded():
    """Gathered in bf16, the embedding would begin a stream in bf16."""

    def loss(lm):
        lm.blocks[0].register_forward_pre_hook(lambda block, args: stream.append(args[0]))
        with torch.autocast("cpu", torch.bfloat16):
            return lm(row[:, :-1], row[:, 1:])

    row = torch.randint(0, 50, (1, 13), generator=torch.Generator().manual_seed(1))
    stream: list[torch.Tensor] = []
    expected = loss(build("Attention", residual_in_fp32=True))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        lm = build("Attention", residual_in_fp32=True)
        fsdp.shard(lm, init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",)), torch.bfloat16)
        found = loss(lm)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close([found, stream[1]], [expected, stream[0]], rtol=0, atol=0)
    assert stream[0].dtype == torch.float32


@pytest.fixture
def of_four(monkeypatch):
    """A strategy that set up the first of four processes, which are not there."""
    monkeypatch.setattr(ModelParallelStrategy, "setup_environment", lambda self: None)
    monkeypatch.setattr(fsdp.FSDP2, "root_device", torch.device("cpu"))

    def made(replicas):
        strategy = fsdp.FSDP2(replicas)
        strategy.parallel_devices = [torch.device("cpu")] * 4
        strategy._lightning_module = types.SimpleNamespace()  # pyright: ignore[reportAttributeAccessIssue]
        strategy.setup_environment()
        return strategy

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield made
    dist.destroy_process_group()


def test_groups_of_processes_hold_a_whole_model_each(of_four):
    mesh = of_four(2).lightning_module.hybrid_mesh
    lm = build("Attention")
    fsdp.shard(lm, mesh, None)
    for parameter in lm.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Replicate(), Shard(0))
        assert parameter.device_mesh.shape == (2, 2)


def test_processes_that_make_no_whole_groups_are_refused(of_four):
    with pytest.raises(UserError, match="does not divide processes=4"):
        of_four(3)


def configured(layers, mesh=None, origin=None):
    """A module that has its weights; `layers` gets its mixers as they are built."""

    def mixer(*place):
        assert not mesh or all(each.is_meta for layer in layers for each in layer.parameters())
        kind: Any = load_mixer("Mamba2")
        layers.append(kind(*place, head_dim=8))
        return layers[-1]

    module: Any = LanguageModel(vocab_size=50, d_model=32, n_layers=3, mixers={"mixer": mixer}, base_width=16)
    module._device_mesh, module._trainer, module.origin = mesh, types.SimpleNamespace(precision="32-true"), origin
    torch.manual_seed(0)
    module.configure_model()
    return module


@pytest.mark.parametrize("goes_on", [False, True], ids=["new", "from weights"])
def test_a_process_builds_one_whole_block_at_a_time_with_the_values_of_one_device(goes_on):
    """The last of five processes has fewer rows than the others, and none of a decay for each of eight heads."""
    origin = {"state_dict": {name: each + 1 for name, each in configured([]).state_dict().items()}} if goes_on else None
    alone = configured([], origin=origin)
    expected = alone.state_dict()
    dist.init_process_group("fake", store=FakeStore(), rank=4, world_size=5)
    try:
        mesh = init_device_mesh("cpu", (5,), mesh_dim_names=("data_parallel",))
        parted = configured([], mesh, origin)
        found = parted.state_dict()
    finally:
        dist.destroy_process_group()
    assert (parted.lm.kinds, parted.lm.scalings) == (alone.lm.kinds, alone.lm.scalings)
    assert found.keys() == expected.keys()
    for name, each in found.items():
        whole = expected[name]
        rows = (*whole.chunk(5), whole[:0])[4]
        torch.testing.assert_close(each.to_local(), rows, rtol=0, atol=0, msg=name)
        assert each.to_local().untyped_storage().nbytes() <= whole.chunk(5)[0].nbytes, name  # the others' rows are gone

"""Optimizers by name: their groups, Muon against PyTorch's, sharded against whole, and exact resume."""

import copy
import csv
import functools
import inspect
import json
import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from seqarch.errors import UserError
from seqarch.mixers.registry import load_mixer, mixer_entries
from seqarch.model import SequenceLM
from seqarch.model.feed_forward import GeGLU
from seqarch.model.roles import kinds_of
from seqarch.model.transfer import transfer_factors
from seqarch.runs.folder import newest_checkpoint
from seqarch.training import fsdp
from seqarch.training.optimizers import Muon, groups_of, orthogonalise, transferred_optimizer
from seqarch.training.schedule import Schedule, warmup_and_decay
from tests import processes

RATE = 0.01
DEADLINE = 120.0
"""Seconds for two processes that train together; they take 10."""


SHARDED = [("Attention", Muon, None), ("Mamba2", Muon, None), ("Mamba2", Muon, 16), ("Mamba2", torch.optim.AdamW, 16)]
"""Three matrices of 32 rows, and some whose rows lie on both processes; optimizers; base widths."""


class Halves(Schedule):
    """A schedule of a user: half the rate from the middle on."""

    def share(self, step: int) -> float:
        return 1.0 if step < self.max_steps / 2 else 0.5


def build(name="Attention", **options):
    mixer = load_mixer(name)
    heads = {"n_heads": 2} if "n_heads" in inspect.signature(mixer).parameters else {}
    torch.manual_seed(0)
    lm = SequenceLM(50, 32, 2, {"mixer": functools.partial(mixer, **heads)}, feed_forward=GeGLU, **options)
    for parameter in lm.blocks.parameters():  # no output starts at zero, so all parameters have gradients
        parameter.data += 0.02 * torch.randn_like(parameter)
    return lm


def descend(lm, optimizer):
    """Two steps along gradients that are the same on any number of processes: orthogonal ones magnify a rounding."""
    for step in range(2):
        draw = torch.Generator().manual_seed(step)
        for parameter in lm.parameters():
            gradient = torch.randn(parameter.shape, generator=draw)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def rows():
    return torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(1))


def muon(lm, kinds=None, **options):
    return Muon(groups_of(dict(lm.named_parameters()), kinds or kinds_of(lm), 0.1), RATE, **options)


def optimizer_of(lm, kind, base_width, kinds, factors):
    """An optimizer by the rule of transfer, if there is a base width."""
    if base_width is None:
        return muon(lm, kinds)
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    return transferred_optimizer(kind, dict(lm.named_parameters()), kinds, factors, base_width, RATE, options)


@pytest.mark.parametrize("name", sorted(entry.name for entry in mixer_entries()))
def test_only_layers_hold_matrices_and_fused_ones_are_whole(name):
    lm = build(name, tie_embeddings=False)
    kinds = kinds_of(lm)
    assert kinds.keys() == {name for name, _ in lm.named_parameters()}
    assert (kinds["embedding.weight"].role, kinds["head.weight"].role) == ("embedding", "head")
    for name, parameter in lm.named_parameters():
        layer = lm.get_submodule(name.rpartition(".")[0])
        is_matrix = kinds[name].role == "matrix"
        assert is_matrix == (isinstance(layer, torch.nn.Linear) and parameter.dim() == 2 and layer is not lm.head)
        assert sum(kinds[name].heights) == (len(parameter) if is_matrix else 0)


def test_projections_that_share_a_layer_are_several_matrices():
    assert kinds_of(build())["blocks.0.mixer.qkv.weight"].heights == (32, 32, 32)
    grouped = build("GatedDeltaNet")
    assert len(kinds_of(grouped)["blocks.0.mixer.qkv.weight"].heights) == 3
    tied = kinds_of(build(tie_embeddings=True))
    assert tied["embedding.weight"].role == "embedding"
    assert "head.weight" not in tied


@pytest.mark.parametrize("size", ["match_rms_adamw", "original"])
def test_muon_is_that_of_pytorch_and_adamw_for_the_rest(size):
    ours, theirs = build(), build()
    kinds = {
        name: kind._replace(heights=kind.heights and (sum(kind.heights),)) for name, kind in kinds_of(ours).items()
    }
    named = dict(theirs.named_parameters())
    matrices = [parameter for name, parameter in named.items() if kinds[name].role == "matrix"]
    others = [
        {"params": [parameter for name, parameter in named.items() if kinds[name][:2] == (role, decayed)]}
        | {"weight_decay": 0.1 * decayed}
        for role, decayed in (("embedding", True), ("vector", False))
    ]
    both = (
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, adjust_lr_fn=size),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), fused=True),
    )
    optimizer = muon(ours, kinds, adjust_lr_fn=size)
    for lm, steps in ((ours, [optimizer]), (theirs, both)):
        lm(rows()[:, :-1], rows()[:, 1:]).backward()
        for each in steps:
            each.step()
    start = dict(build().named_parameters())
    for name, parameter in ours.named_parameters():
        moved, expected = parameter - start[name], named[name] - start[name]
        if kinds[name].role == "matrix":  # a step of bf16 numbers
            torch.testing.assert_close(moved, expected, rtol=0, atol=0.02 * float(expected.detach().abs().max()))
        else:
            assert torch.equal(moved, expected), name


def test_fused_matrices_are_orthogonalised_apart():
    """The step of q, k and v in one layer is that of three layers."""
    fused = torch.nn.Parameter(torch.zeros(12, 8))
    apart = [torch.nn.Parameter(torch.zeros(4, 8)) for _ in range(3)]
    fused.grad = torch.randn(12, 8) * torch.tensor([1.0, 50.0, 0.01]).repeat_interleave(4)[:, None]
    for part, gradient in zip(apart, fused.grad.split(4), strict=True):
        part.grad = gradient
    for parameters, heights in (([fused], (4, 4, 4)), (apart, (4,))):
        Muon([{"params": parameters, "role": "matrix", "heights": heights}], RATE).step()
    assert torch.equal(fused, torch.cat([*apart]))
    whole = torch.nn.Parameter(torch.zeros(12, 8))
    whole.grad = fused.grad
    Muon([{"params": [whole], "role": "matrix", "heights": (12,)}], RATE).step()
    assert not torch.allclose(whole, fused, atol=1e-3)


def test_a_copied_model_keeps_what_its_parameters_are():
    lm = build("GatedDeltaNet")
    assert copy.deepcopy(lm).kinds == lm.kinds == kinds_of(lm)
    assert len(lm.kinds["blocks.0.mixer.qkv.weight"].heights) == 3
    recurrent = build("RWKV7")
    assert transfer_factors(copy.deepcopy(recurrent), 8) == transfer_factors(recurrent, 8)


def test_muon_keeps_one_adamw(monkeypatch):
    lm = build()
    optimizer = muon(lm)
    monkeypatch.setattr(torch.optim, "AdamW", None)
    lm(rows()[:, :-1], rows()[:, 1:]).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert float(optimizer.state[lm.embedding.weight]["step"]) == 2


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 40, 16), (2, 16, 40)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape).bfloat16()).float())
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def sharded(rank, port, path):
    """One of two processes; the first saves the weights of Muon and AdamW under FSDP2."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    found = {}
    for name, kind, base_width in SHARDED:
        lm = build(name)
        known = lm.kinds, transfer_factors(lm, base_width)
        fsdp.shard(lm, mesh, None)
        descend(lm, optimizer_of(lm, kind, base_width, *known))
        weights = {key: each.full_tensor() for key, each in lm.named_parameters() if isinstance(each, DTensor)}
        found[name, kind.__name__, base_width] = {key: each.detach() for key, each in weights.items()}
    dist.destroy_process_group()
    if rank == 0:
        torch.save(found, path)


@pytest.mark.commands
def test_two_processes_take_the_steps_of_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [processes.SERVER.Process(target=sharded, args=(rank, port, tmp_path / "w")) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(DEADLINE)
        rank.kill()
    found = torch.load(tmp_path / "w")
    for name, kind, base_width in SHARDED:
        weights = found[name, kind.__name__, base_width]
        alone = build(name)
        known = alone.kinds, transfer_factors(alone, base_width)
        descend(alone, optimizer_of(alone, kind, base_width, *known))
        start = dict(build(name).named_parameters())
        for key, parameter in alone.named_parameters():
            moved, expected = weights[key] - start[key], parameter - start[key]
            torch.testing.assert_close(moved, expected, rtol=0, atol=2**-7 * float(expected.detach().abs().max()))


def curves(run):
    with (run / "curves.csv").open(newline="") as file:
        return [{key: row[key] for key in row if "throughput" not in key} for row in csv.DictReader(file)]


def interrupted(run):
    """Make a finished run one that was killed after its checkpoint of step 2; return what it had ended with."""
    newest = newest_checkpoint(run)
    assert newest is not None
    before = curves(run), torch.load(newest, weights_only=True)
    newest.unlink()
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    return before


@pytest.mark.commands
@pytest.mark.parametrize(
    "options",
    [
        {"model.optimizer": "Muon", "model.schedule": "cosine", "model.warmup_steps": 1},
        {"model.optimizer": "{class_path: SGD, init_args: {momentum: 0.9}}", "model.decay_share": 0.5},
        {"model.optimizer": "Adafactor", "model.schedule": "constant_then_decay", "model.decay_share": 0.5},
        {"model.schedule": "tests.training.test_optimizers.Halves", "allow_code": "tests"},
        {"model.base_width": 16, "model.warmup_steps": 1},
        {"model.base_width": 16, "model.optimizer": "Muon", "model.warmup_steps": 1},
        {
            "model.mixers": "{a: tests.training.test_added_losses.Drawn}",
            "allow_code": "tests",
            "model.decay_share": 0.5,
            "model.schedule": "constant_then_decay",
        },
    ],
)
def test_any_optimizer_and_schedule_resume_bit_for_bit(fit, options):
    run = fit(**options)
    rates = [float(row["learning_rate"]) for row in curves(run) if row["learning_rate"]]
    rows, saved = interrupted(run)
    fit(**options)
    assert curves(run) == rows
    newest = newest_checkpoint(run)
    assert newest is not None
    again = torch.load(newest, weights_only=True)
    assert all(torch.equal(again["state_dict"][name], each) for name, each in saved["state_dict"].items())
    assert len({*rates}) > 1


def test_a_checkpoint_with_the_state_of_another_optimizer_is_refused(fit):
    run = fit(**{"model.optimizer": "Muon"})
    for other in ({"model.optimizer": "SGD"}, {}):
        with pytest.raises(UserError, match=r"another class or damaged: .*Take the optimizer of its run"):
            fit("other", **other, ckpt_path=run, **{"trainer.max_steps": 6})


def test_a_cosine_falls_slowly_first_and_last():
    shares = [warmup_and_decay(step, 0, 4, 8, "cosine") for step in range(9)]
    assert shares == pytest.approx([1, 1, 1, 1, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model.optimizer": "Muo"}, "there is no Optimizer 'Muo': did you mean Muon?"),
        ({"model.optimizer": "torch.nn.Linear"}, "'torch.nn.Linear' belongs neither to seqarch nor to an installed"),
        ({"model.optimizer": "torch.optim.Muon"}, "model.optimizer: Muon only supports 2D parameters"),
        ({"model.optimizer": "Rprop"}, "Rprop has no weight_decay: set model.weight_decay to 0"),
        (
            {"model.optimizer": "SGD", "model.betas": [0.8, 0.9]},
            r"SGD has no betas: set model\.betas to \[0\.9, 0\.95\]",
        ),
        (
            {"model.optimizer": "{class_path: AdamW, init_args: {fused: true, foreach: true}}"},
            "model.optimizer: `fused` and `foreach` cannot be `True` together.",
        ),
        (
            {"model.optimizer": "SparseAdam", "model.weight_decay": 0},
            "SparseAdam cannot step parameters: SparseAdam do",
        ),
        ({"model.optimizer": "Optimizer"}, "Optimizer is a base class: (expected A|name a subclass)"),
        (
            {"model.optimizer": "{class_path: AdamW, init_args: {differentiable: true}}"},
            "AdamW cannot step parameters: a leaf Variable that requires grad is being used in an in-place operation",
        ),
        ({"model.optimizer": "{class_path: AdamW, init_args: {lr: 1}}"}, "AdamW has no option 'lr'"),
        ({"model.optimizer": "{class_path: Adam, init_args: {betas: [0, 0]}}"}, "betas is an option of the model"),
        ({"model.optimizer": "{class_path: Muon, init_args: {momentum: 1}}"}, r"momentum must lie in 0\.\.1, 1 exc"),
        ({"model.schedule": "cosin"}, "there is no 'cosin': did you mean cosine?"),
        ({"model.schedule": "constant_then_decay"}, "needs model.decay_share, such as 0.2"),
    ],
)
def test_what_is_wrong_with_an_optimizer_is_said_in_a_line(fit, options, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        fit(**options)

"""Fully sharded data parallelism (FSDP2): parameters, gradients and optimizer state are split over all devices."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils import swap_tensors

from seqarch.arguments import Count, Limited, divide
from seqarch.mixers.pieces import GROUPS, Piece
from seqarch.model import SequenceLM
from seqarch.model.lm import Blocks
from seqarch.training.sharded_checkpoints import ShardedCheckpoints

CONTEXT = "context"
"""Name of the group of processes that share this process's sequences."""


class FSDP2(Limited, ShardedCheckpoints):
    """Lightning's `ModelParallelStrategy` with every device in one data-parallel group; `trainer.strategy: fsdp2`.

    A checkpoint is one file, the same as without sharding, or with `checkpoint.sharded` a folder. From both, any number
    of devices can resume a run, evaluate it or generate text.

    Args:
        replicas: how many groups of processes hold a whole model each; None for one per node (`fsdp2_hybrid`). Within a
            group, which has consecutive ranks, parameters are split and gathered. Between groups only gradients are
            summed.
        context: how many processes share each sequence. Each reads one piece of it, which must be equally long. These
            processes have consecutive ranks.

    Raises:
        UserError: the processes cannot be split into so many groups.
    """

    option_prefix = "FSDP2."

    def __init__(self, replicas: Count | None = 1, context: Count = 1) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)
        self.replicas, self.context = replicas, context

    def setup_environment(self) -> None:
        replicas, count = self.replicas or self.num_nodes, self.num_nodes * self.num_processes
        for name, groups in {"replicas": replicas, "context": self.context}.items():
            divide(**{"processes": count, f"FSDP2.{name}": groups})
        self._data_parallel_size = count
        super().setup_environment()
        module: Any = self.lightning_module
        if replicas > 1:
            shape, names = (replicas, count // replicas), ("replicas", "shards")
            module.hybrid_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        if self.context > 1:
            shape, names = (count // self.context, self.context), ("data", "context")
            mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)["context"]
            GROUPS[CONTEXT] = mesh.get_group()
            length = module.trainer.datamodule.sequence_length // self.context
            module.piece = Piece(mesh.get_local_rank(), self.context, length, CONTEXT)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The processes that read other sequences, and which of them this one is."""
        return {"num_replicas": self.world_size // self.context, "rank": self.global_rank // self.context}

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Draw weights on the GPU, as on one device, so that a seed gives the same model on any number of GPUs."""
        with self.root_device, super().tensor_init_context(empty_init):
            yield

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gather parameters and exchange gradients once per step: all micro-batches but the last keep both.

        The last forward pass frees the parameters, and its backward pass gathers them again.
        """
        lm: Any = getattr(self.lightning_module, "lm", None)
        for last in (False, True):
            lm.set_requires_gradient_sync(last)
            lm.set_reshard_after_backward(last)
            for block in lm.blocks:
                block.set_reshard_after_forward(last)
            if not last:
                yield


def data_processes(trainer: Any) -> int:
    """Number of the trainer's processes, or groups of them, that read other sequences."""
    return trainer.world_size // getattr(trainer.strategy, "context", 1)


StrategyRegistry.register("fsdp2", FSDP2, description="parameters split over all devices (FSDP2)")
StrategyRegistry.register(
    "fsdp2_hybrid", FSDP2, description="parameters split over the devices of a node", replicas=None
)


@contextmanager
def in_parts(mesh: DeviceMesh) -> Iterator[dict[str, Tensor]]:
    """While a model is built, keep only this process's rows of each block that is complete, so that one block is whole.

    The parameters of a complete block are on the meta device. Every process draws all values, as one device does.

    Yields:
        This process's rows of each parameter, for `fill`.
    """
    parts: dict[str, Tensor] = {}
    own, count = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)

    def keep_rows(parent: nn.Module, number: str, block: nn.Module | None) -> None:
        if not isinstance(parent, Blocks) or block is None:
            return
        for name, parameter in block.named_parameters():
            whole = parameter.detach()
            parts[f"blocks.{number}.{name}"] = (*whole.chunk(count), *[whole[:0]] * count)[own].clone()
            meta = nn.Parameter(torch.empty_like(whole, device="meta"), parameter.requires_grad)
            vars(meta).update(vars(parameter))
            swap_tensors(parameter, meta)

    handle = register_module_module_registration_hook(keep_rows)
    try:
        yield parts
    finally:
        handle.remove()


def fill(lm: SequenceLM, parts: Mapping[str, Tensor]) -> None:
    """Give the parameters of a sharded model the rows that `in_parts` kept."""
    rows = {}
    for name, parameter in lm.named_parameters():
        if name in parts and isinstance(parameter, DTensor):
            like = {"shape": parameter.shape, "stride": parameter.stride()}
            rows[name] = DTensor.from_local(parts[name], parameter.device_mesh, parameter.placements, **like)
    lm.load_state_dict(rows, strict=False, assign=True)


def split_like(own: Tensor | None, whole: Tensor) -> Tensor:
    """A tensor that every process has, split as `own` is, if it is split."""
    if not isinstance(own, DTensor):
        return whole
    return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)


def shard(lm: SequenceLM, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Shard the matrices of each block, then all other parameters of the blocks together, then what remains.

    Matrices of linear layers are gathered in `dtype`, in which autocast multiplies by them anyway (`None`: their own).
    So are the embedding, the last norm and the head, unless the residual stream is float32. The other parameters of the
    blocks, such as norms, convolutions, decays and steps of a recurrence, are few. One group of all blocks holds them.
    It is gathered in float32, once per step. Rounded, they would give other decays than on one device. Gradients are
    summed in float32. A mesh of two dimensions has copies along the first.
    """
    rounded, exact = (
        MixedPrecisionPolicy(param_dtype=each, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for each in (dtype, None)
    )
    layers = [layer for layer in lm.blocks.modules() if isinstance(layer, nn.Linear)]
    matrices = {parameter for layer in layers for parameter in layer.parameters()}
    # From the outside in: FSDP2 does not look into modules that are sharded already.
    fully_shard(lm.blocks, mesh=mesh, mp_policy=exact, ignored_params=matrices, reshard_after_forward=False)
    others: set[nn.Parameter] = {each for each in lm.blocks.parameters() if isinstance(each, DTensor)}
    for block in lm.blocks:
        fully_shard(block, mesh=mesh, mp_policy=rounded, ignored_params=others)
    fully_shard(lm, mesh=mesh, mp_policy=exact if lm.residual_in_fp32 else rounded)

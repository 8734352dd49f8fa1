"""Fully sharded data parallelism (FSDP2): parameters, gradients and optimizer state are split over all devices."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from seqarch.model import SequenceLM


class FSDP2(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` with every device in one data-parallel group; `trainer.strategy: fsdp2`.

    Checkpoints are one file, the same as without sharding, so that a run may go on, be evaluated or generate text on
    any number of devices.
    """

    def __init__(self, process_group_backend: str | None = None) -> None:
        super().__init__(
            tensor_parallel_size=1, save_distributed_checkpoint=False, process_group_backend=process_group_backend
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


ROUNDED = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
"""Modules whose weights may be rounded to bf16 for the forward and the backward pass."""

StrategyRegistry.register("fsdp2", FSDP2, description="parameters split over all devices (FSDP2)")


def shard(lm: SequenceLM, device_mesh: DeviceMesh) -> None:
    """Shard each block, then what remains (embedding, norm, head); see `mixed_precision`."""
    mesh = device_mesh["data_parallel"]
    for module in (*lm.blocks, lm):
        fully_shard(module, mesh=mesh, mp_policy=mixed_precision(module, mesh.device_type))


def mixed_precision(module: nn.Module, device_type: str) -> MixedPrecisionPolicy:
    """Mixed-precision policy for the parameters of a module that are not yet sharded; gradients are summed in float32.

    On GPUs a module of linear layers, embeddings and norms is gathered in bf16, in which autocast multiplies by weights
    anyway. Other parameters, such as decays and steps of a recurrence, are used in float32. Rounded, they would give
    other decays than on one device, and small updates would be lost. FSDP2 has one dtype per group, so a module with
    such parameters is gathered in float32 as a whole.
    """
    left = (
        part for part in module.modules() if any(not isinstance(p, DTensor) for p in part.parameters(recurse=False))
    )
    in_half = device_type == "cuda" and all(isinstance(part, ROUNDED) for part in left)
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if in_half else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )

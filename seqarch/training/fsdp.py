"""Fully sharded data parallelism (FSDP2): parameters, gradients and optimizer state are split over all devices."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


StrategyRegistry.register("fsdp2", FSDP2, description="parameters split over all devices (FSDP2)")


def shard(lm: SequenceLM, device_mesh: DeviceMesh) -> None:
    """Shard each block, then what remains (embedding, norm, head).

    On GPUs parameters are gathered in bf16, gradients reduced in fp32.
    """
    mesh = device_mesh["data_parallel"]
    on_gpu = mesh.device_type == "cuda"
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if on_gpu else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in lm.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(lm, mesh=mesh, mp_policy=precision)

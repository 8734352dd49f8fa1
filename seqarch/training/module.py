"""The LightningModule: what one step of pre-training is, whatever the mixer."""

import math
import re
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from seqarch.errors import UserError
from seqarch.evaluation import LossByDomain, Scorer, Scores, Task, evaluate
from seqarch.model import SequenceLM
from seqarch.training.float8 import Scaling, check_float8, use_float8
from seqarch.training.fsdp import shard

UNUSED = {"overfit_batches": 0.0, "limit_train_batches": 1.0, "reload_dataloaders_every_n_epochs": 0, "min_steps": None}
"""Options of the trainer that training cannot follow, each with the value that changes nothing."""


class LanguageModel(L.LightningModule):
    """Pre-trains a `SequenceLM`: AdamW, linear warm-up, linear decay to zero at `trainer.max_steps`.

    Args:
        learning_rate: highest learning rate.
        warmup_steps: steps over which the learning rate rises from zero.
        decay_share: share of all steps over which the learning rate falls to zero at the end; 0 for no fall. Between
            warm-up and fall it is constant (Hägele et al. 2024, arXiv 2405.18392). By default it falls after warm-up.
        betas: AdamW's decay rates.
        weight_decay: for matrices only; vectors (norms, biases, gains) and parameters marked with the attribute
            `_no_weight_decay` are not decayed.
        compile: compile each block and the loss with torch.compile.
        activation_checkpointing: keep only the input of each block and compute the rest again in the backward pass.
        float8: multiply matrices of the blocks in FP8 while training, with one scale for each tensor ("tensorwise",
            faster) or row ("rowwise", rounds less). Needs torchao and an FP8 GPU.
        model: the options of `SequenceLM`.
    """

    def __init__(
        self,
        *,
        learning_rate: float = 3e-4,
        warmup_steps: int = 0,
        decay_share: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        compile: bool = False,
        activation_checkpointing: bool = False,
        float8: Scaling | None = None,
        **model,
    ) -> None:
        super().__init__()
        check_optimizer(learning_rate, betas, weight_decay)
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.decay_share = decay_share
        self.betas = betas
        self.weight_decay = weight_decay
        self.compile_blocks = compile
        self.activation_checkpointing = activation_checkpointing
        self.float8: Scaling | None = float8
        self.model_options = model
        self.lm: SequenceLM | None = None
        self._undecayed: set[str] = set()
        self.tasks: Sequence[Task] | None = None
        """What `trainer.validate` and `trainer.test` score, if not the loss by domain and the callbacks' tasks."""
        self.scores: Scores | None = None
        """The scores of the last such call."""
        self.gradient_norm: Tensor | None = None
        """Norm of the last step's gradient before clipping."""

    def build(self) -> SequenceLM:
        """The bare model, with new weights.

        Raises:
            UserError: the model cannot be built, or not in this machine's memory.
        """
        try:
            return SequenceLM(**self.model_options)
        except (RuntimeError, TypeError, OverflowError) as error:
            first = str(error).splitlines()[0]
            if not re.search("overflow|can't allocate", first, re.IGNORECASE):
                raise
            raise UserError(f"the model is too large for the memory here: {first.rpartition(': ')[2]}") from error

    def setup(self, stage: str) -> None:
        trainer: Any = self.trainer
        tokenizer = trainer.datamodule.tokenizer
        if (vocab_size := self.model_options["vocab_size"]) < tokenizer.vocab_size:
            raise UserError(
                f"model.vocab_size is {vocab_size}, but the data's tokenizer '{tokenizer.name}' has "
                f"{tokenizer.vocab_size} entries: set model.vocab_size to at least {tokenizer.vocab_size}"
            )

        if stage == "fit":
            check_trainer(trainer)
            if self.float8:
                check_float8(trainer)

    def only_read(self, *, compiled: bool = False) -> None:
        """Say, before the model is built, that nothing trains it: no FP8, and compiled only if asked here too."""
        self.float8 = None
        self.compile_blocks = self.compile_blocks and compiled

    def configure_model(self) -> None:
        built_before = self.lm is not None  # and compiled, by a run before this one
        if self.lm is None:
            self.lm = self.build()
        # by name, since sharding makes other parameters of them
        self._undecayed = {name for name, parameter in self.named_parameters() if not is_decayed(parameter)}
        if built_before:
            return
        if self.activation_checkpointing:
            self.lm.checkpoint_activations()
        if self.float8:
            use_float8(self.lm.blocks, self.float8)
        if self.device_mesh is not None:
            shard(self.lm, self.device_mesh, torch.bfloat16 if self.trainer.precision == "bf16-mixed" else None)
        if self.compile_blocks:
            self.lm.compile_parts()

    def built(self) -> SequenceLM:
        """The model, once `configure_model` has built it."""
        assert self.lm is not None
        return self.lm

    def configure_optimizers(self):
        max_steps = self.trainer.max_steps
        self.check_schedule(max_steps)
        if self.trainer.precision == "16-mixed":
            raise UserError("trainer.precision 16-mixed scales gradients, which clipping does not undo: use bf16-mixed")
        optimizer = self.adamw()
        start = decay_start(self.warmup_steps, max_steps, self.decay_share)
        schedule = LambdaLR(optimizer, lambda step: warmup_and_decay(step, self.warmup_steps, start, max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Follow the options of this run: a restored optimizer has those of the run that wrote the checkpoint."""
        schedule: Any = self.trainer.lr_scheduler_configs[0].scheduler
        schedule.base_lrs = [self.learning_rate] * 2
        rate = self.learning_rate * schedule.lr_lambdas[0](schedule.last_epoch)
        for group, weight_decay in zip(schedule.optimizer.param_groups, (self.weight_decay, 0.0), strict=True):
            group.update(lr=rate, betas=self.betas, weight_decay=weight_decay)

    def check_schedule(self, max_steps: int) -> None:
        """Raise `UserError` if the learning rate cannot rise and fall to zero within these steps."""
        if max_steps < 1:
            raise UserError(f"set trainer.max_steps to 1 or more, not {max_steps}: the learning rate ends at 0 there")
        if not 0 <= self.warmup_steps < max_steps:
            raise UserError(
                f"model.warmup_steps is {self.warmup_steps}; it must lie in 0..{max_steps - 1}, below trainer.max_steps"
            )
        if self.decay_share is not None and not 0 <= self.decay_share <= 1:
            raise UserError(f"model.decay_share must lie in 0..1, not {self.decay_share}")

    def adamw(self) -> torch.optim.AdamW:
        """The optimizer of the weights, once `configure_model` has built them."""
        parameters = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        decayed = [parameter for name, parameter in parameters.items() if name not in self._undecayed]
        others = [parameter for name, parameter in parameters.items() if name in self._undecayed]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, fused=True)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Clip by norm. Lightning refuses this for fused optimizers, which matters only for fp16's loss scaling."""
        if gradient_clip_algorithm not in (None, "norm"):
            raise UserError("trainer.gradient_clip_algorithm must be norm, as it is by default")
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val or float("inf"))
        self.gradient_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-token loss of `tokens [B, T + 1]`, in nats per token, averaged over the B * T predictions."""
        return self.built()(tokens[:, :-1], tokens[:, 1:])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self(batch["tokens"])
        self.log("loss", loss.detach(), prog_bar=True, logger=False)
        return loss

    def validation_step(self, batch: int, batch_idx: int) -> None:
        self._evaluate(LossByDomain())

    def test_step(self, batch: int, batch_idx: int) -> None:
        self._evaluate(LossByDomain(whole=True))

    def scorer(self) -> Scorer:
        """The model in training as evaluation tasks see it, shared by the processes of the trainer."""
        trainer: Any = self.trainer
        batch_size = trainer.datamodule.batch_size(trainer.world_size)
        return Scorer(
            self.built(),
            trainer.datamodule.tokenizer,
            context=trainer.precision_plugin.forward_context,
            batch_size=batch_size,
            max_tokens=batch_size * trainer.datamodule.sequence_length,
            length=trainer.datamodule.sequence_length,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )

    def _evaluate(self, by_domain: LossByDomain) -> None:
        """Score `tasks`, by default the loss by domain and the tasks of the run's callbacks."""
        trainer: Any = self.trainer
        tasks = self.tasks
        if tasks is None:
            used = (each for each in trainer.callbacks if getattr(each, "at", 0) or getattr(each, "every_n_steps", 0))
            scored = [task for each in used for task in getattr(each, "tasks", ()) if isinstance(task, Task)]
            tasks = [by_domain, *(task for task in scored if not isinstance(task, LossByDomain))]
        self.scores = evaluate(tasks, self.scorer(), trainer.datamodule)
        self.log_dict(self.scores.metrics, sync_dist=True, batch_size=1)  # every process has the same


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse options of the trainer that prevent training or that training would not follow."""
    if (clip := trainer.gradient_clip_val) is not None and not 0 <= clip < math.inf:
        raise UserError(f"trainer.gradient_clip_val must be 0 (off) or more, not {clip}: below 0 the loss would rise")
    if trainer.max_epochs not in (None, -1):
        raise UserError(
            f"trainer.max_epochs is {trainer.max_epochs}, but max_steps ends a run: leave it and fast_dev_run out"
        )
    for option, default in UNUSED.items():
        given = getattr(trainer, option)
        if (type(given), given) != (type(default), default):  # 1 is one batch, 1.0 is all
            raise UserError(f"trainer.{option} is {given}, but samples follow from max_steps and data: leave it out")


def check_optimizer(learning_rate: float, betas: Sequence[float], weight_decay: float) -> None:
    """Refuse numbers that AdamW cannot take."""
    if not 0 < learning_rate < math.inf:
        raise UserError(f"model.learning_rate must be positive, not {learning_rate}")
    if not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"model.betas must lie in 0..1, 1 excluded, not {list(betas)}")
    if not 0 <= weight_decay < math.inf:
        raise UserError(f"model.weight_decay must be 0 or more, not {weight_decay}")


def decay_start(warmup_steps: int, max_steps: int, decay_share: float | None) -> int:
    """The step from which the learning rate falls to zero at `max_steps`: never one of the warm-up."""
    return warmup_steps if decay_share is None else max(warmup_steps, max_steps - round(decay_share * max_steps))


def warmup_and_decay(step: int, warmup_steps: int, start: int, max_steps: int) -> float:
    """Share of the highest learning rate at a step: a linear rise over `warmup_steps`, a linear fall from `start` on.

    From `max_steps` on it is 0.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 1.0 if step < start else max(0.0, (max_steps - step) / max(1, max_steps - start))


def is_decayed(parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to parameters with at least two dimensions longer than one, unless marked."""
    return sum(size > 1 for size in parameter.shape) >= 2 and not getattr(parameter, "_no_weight_decay", False)

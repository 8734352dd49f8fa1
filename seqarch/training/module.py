"""The LightningModule: what one step of pre-training is, whatever the mixer."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from seqarch.arguments import COUNT, Count, Interval, Limited, Positive, Steps
from seqarch.errors import UserError
from seqarch.evaluation import LossByDomain, Scorer, Scores, Task, evaluate
from seqarch.kernels.tensors import bound_documents
from seqarch.mixers.pieces import Piece
from seqarch.model import SequenceLM
from seqarch.model.transfer import Factors, scale_initial, transfer_factors
from seqarch.training.checks import check_capability, check_pieces, check_trainer
from seqarch.training.float8 import Scaling, check_float8, use_float8
from seqarch.training.fsdp import data_processes, fill, in_parts, shard, split_like
from seqarch.training.optimizers import (
    OF_THE_MODEL,
    OptimizerFactory,
    groups_of,
    named_optimizer,
    transferred_optimizer,
    try_step,
)
from seqarch.training.schedule import ScheduleFactory, Shape, decay_start, warmup_and_decay
from seqarch.training.weights import fitting

Rate = Annotated[float, Interval(0, 1)]


class LanguageModel(Limited, L.LightningModule):
    """Pre-trains a `SequenceLM`: AdamW, linear warm-up, linear decay to zero at `trainer.max_steps`.

    Args:
        learning_rate: highest learning rate, of any optimizer.
        warmup_steps: steps over which the learning rate rises from zero.
        rewarm_steps: steps over which the learning rate rises from zero to that of the schedule, in a run that goes on
            from a checkpoint of another run; 0 continues with the rate of the schedule.
        schedule: how the learning rate falls to zero: "linear", "cosine", or "constant_then_decay", which is linear
            and needs `decay_share`; or a subclass of `seqarch.training.schedule.Schedule`, which gives all of it.
        decay_share: share of all steps over which the learning rate falls to zero at the end; 0 for no fall. Between
            warm-up and fall it is constant (Hägele et al. 2024, arXiv 2405.18392). By default it falls after warm-up.
        base_width: `d_model` for which `learning_rate` was chosen. A model of another width then starts and learns by
            muP, with which the best rate stays the same (`seqarch.model.transfer`).
        optimizer: a class of `torch.optim`, of seqarch (`Muon`) or of a plug-in; by default fused AdamW. It takes the
            learning rate, `betas` and `weight_decay` from here, as far as it knows them.
        betas: AdamW's decay rates.
        weight_decay: for matrices only; vectors (norms, biases, gains) and parameters marked with the attribute
            `_no_weight_decay` are not decayed.
        compile: compile each block and the loss with torch.compile.
        activation_checkpointing: keep only the input of each block and compute the rest again in the backward pass.
        float8: multiply matrices of the blocks in FP8 while training, with one scale for each tensor ("tensorwise",
            faster) or row ("rowwise", rounds less). Needs torchao and an FP8 GPU.
        model: the options of `SequenceLM`.
    """

    option_prefix = "model."
    asked_precision: str | int | None = None
    """`trainer.precision` of the recipe; on a CPU Lightning replaces 16-mixed by bf16-mixed."""

    def __init__(
        self,
        *,
        learning_rate: Positive = 3e-4,
        warmup_steps: Steps = 0,
        rewarm_steps: Steps = 0,
        schedule: Shape | ScheduleFactory = "linear",
        decay_share: Annotated[float, Interval(0, 1, "[]")] | None = None,
        base_width: Count | None = None,
        optimizer: OptimizerFactory | None = None,
        betas: tuple[Rate, Rate] = (0.9, 0.95),
        weight_decay: Annotated[float, Interval(0)] = 0.1,
        compile: bool = False,
        activation_checkpointing: bool = False,
        float8: Scaling | None = None,
        **model,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.rewarm_steps = rewarm_steps
        self.began = self.began_tokens = 0
        """The step of another run's checkpoint that this run began from, and the training tokens until then."""
        self.schedule: Shape | ScheduleFactory = schedule
        self.decay_share = decay_share
        self.base_width = base_width
        self.optimizer_factory = optimizer
        self.betas = betas
        self.weight_decay = weight_decay
        self.compile_blocks = compile
        self.activation_checkpointing = activation_checkpointing
        self.float8: Scaling | None = float8
        self.model_options = model
        self.lm: SequenceLM | None = None
        self.origin: dict[str, Any] | None = None
        """The content of a file of weights that training begins with."""
        self.document_mask = False
        """Whether the data has documents that do not see each other."""
        self.hybrid_mesh: DeviceMesh | None = None
        """Copies and shards of the parameters, where a strategy has both."""
        self.piece: Piece | None = None
        """Which piece of each training sequence this process reads, where a strategy has several share it."""
        self._factors: dict[str, Factors] = {}
        self._seed = 0
        self.tasks: Sequence[Task] | None = None
        """What `trainer.validate` and `trainer.test` score, if not the loss by domain and the callbacks' tasks."""
        self.scores: Scores | None = None
        """The scores of the last such call."""
        self.gradient_norm: Tensor | None = None
        """Norm of the last step's gradient before clipping."""

    def extra_repr(self) -> str:
        return "" if self.lm is not None else "no weights yet: fit makes them, and so does configure_model"

    def build(self) -> SequenceLM:
        """The bare model, with new weights.

        Raises:
            UserError: the model cannot be built.
        """
        return SequenceLM(**self.model_options)

    def setup(self, stage: str) -> None:
        trainer: Any = self.trainer
        tokenizer = trainer.datamodule.tokenizer
        tokenizer.check_fits(self.model_options["vocab_size"])
        self.document_mask = trainer.datamodule.document_mask
        if stage == "fit":
            check_trainer(trainer)
            if self.float8:
                check_float8(trainer)

    def prepare_inference(self, *, compiled: bool = False) -> None:
        """Say, before the model is built, that nothing trains it: no FP8, and compiled only if asked here too."""
        self.float8 = None
        self.compile_blocks = self.compile_blocks and compiled

    def configure_model(self) -> None:
        built_before = self.lm is not None  # and compiled, by a run before this one
        mesh = self.hybrid_mesh or (self.device_mesh and self.device_mesh["data_parallel"])
        with in_parts(mesh) if mesh else nullcontext({}) as parts:
            self.lm = self.lm or self.build()
        self._factors = transfer_factors(self.lm, self.base_width)
        if self.document_mask:
            check_capability(self.lm, "packed", "data.document_mask")
            self.lm.document_mask = True
        if self.piece is not None:
            data: Any = getattr(self.trainer, "datamodule", None)
            check_pieces(self.lm, self.piece, self.document_mask, data.sequence_length)
        if built_before:
            return
        if self.activation_checkpointing:
            self.lm.checkpoint_activations()
        if self.float8:
            use_float8(self.lm.blocks, self.float8)
        if mesh:
            shard(self.lm, mesh, torch.bfloat16 if self.trainer.precision == "bf16-mixed" else None)
            fill(self.lm, parts)
        self._start_weights()
        if self.compile_blocks:
            self.lm.compile_parts()

    def _start_weights(self) -> None:
        """Make the weights those from which training begins, by the rule of transfer or of another run."""
        scale_initial(self.built(), self._factors)
        if self.origin:
            own, weights = self.state_dict(), self.origin["state_dict"]
            self.load_state_dict({name: split_like(own.get(name), each) for name, each in weights.items()})

    load_state_dict = fitting()(L.LightningModule.load_state_dict)

    def built(self) -> SequenceLM:
        """The model, once `configure_model` has built it."""
        assert self.lm is not None
        return self.lm

    def configure_optimizers(self):
        max_steps = self.trainer.max_steps
        self.check_schedule(max_steps)
        if {self.trainer.precision, str(self.asked_precision)} & {"16-mixed", "16"}:
            raise UserError("trainer.precision 16-mixed scales gradients, which clipping does not undo: use bf16-mixed")
        optimizer = self.new_optimizer()
        if self.optimizer_factory is not None:
            try_step(optimizer, self.device_mesh and self.device_mesh["data_parallel"])
        schedule = LambdaLR(optimizer, self.rate_shares(max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def rate_shares(self, max_steps: int) -> Callable[[int], float]:
        """The function from a step to its share of the highest learning rate, for a run of `max_steps`."""
        if callable(self.schedule):
            share = self.schedule(self.warmup_steps, max_steps).share
        else:
            start = decay_start(self.warmup_steps, max_steps, self.decay_share)
            share = functools.partial(
                warmup_and_decay, warmup_steps=self.warmup_steps, start=start, max_steps=max_steps, shape=self.schedule
            )

        def rewarmed(step: int) -> float:
            since = step - self.began
            return share(step) * min(1.0, (since + 1) / (self.rewarm_steps + 1)) if self.began else share(step)

        return rewarmed

    def on_fit_start(self) -> None:
        self._seed = torch.initial_seed()
        trainer: Any = self.trainer
        length = 0 if self.document_mask else trainer.datamodule.sequence_length  # documents may be shorter
        self.built().check_positions(length)

    def on_train_start(self) -> None:
        """Follow the options of this run: a restored optimizer has those of the run that wrote the checkpoint."""
        schedule: Any = self.trainer.lr_scheduler_configs[0].scheduler
        share = schedule.lr_lambdas[0](schedule.last_epoch)
        schedule.base_lrs = []
        for group, own in zip(schedule.optimizer.param_groups, self.new_optimizer().param_groups, strict=True):
            schedule.base_lrs.append(own["lr"])
            group.update({name: own[name] for name in OF_THE_MODEL if name in own}, lr=own["lr"] * share)

    def check_schedule(self, max_steps: int) -> None:
        """Raise `UserError` if the learning rate cannot rise and fall to zero within these steps."""
        COUNT.check("trainer.max_steps", max_steps)
        Interval(0, max_steps - 1, "[]").check("model.warmup_steps (below trainer.max_steps)", self.warmup_steps)
        if self.schedule == "constant_then_decay" and self.decay_share is None:
            raise UserError("model.schedule constant_then_decay needs model.decay_share, such as 0.2")
        if callable(self.schedule) and self.decay_share is not None:
            raise UserError("model.decay_share has no effect on a schedule of your own: leave it out")

    def new_optimizer(self) -> torch.optim.Optimizer:
        """A new optimizer of the weights, once `configure_model` has built them."""
        named = self.built().named_parameters()
        parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        kinds = self.built().kinds
        options = {"betas": tuple(self.betas), "weight_decay": self.weight_decay}
        if self.base_width is not None:
            known = kinds, self._factors, self.base_width
            return transferred_optimizer(self.optimizer_factory, parameters, *known, self.learning_rate, options)
        if self.optimizer_factory is not None:
            groups = groups_of(parameters, kinds, self.weight_decay)
            return named_optimizer(self.optimizer_factory, groups, self.learning_rate, options)
        # two groups, each in the order of the model, as old checkpoints have them
        decayed = [each for name, each in parameters.items() if kinds[name].decayed]
        others = [each for name, each in parameters.items() if not kinds[name].decayed]
        pairs = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(pairs, lr=self.learning_rate, betas=self.betas, fused=True)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Clip by norm. Lightning refuses this for fused optimizers, which matters only for fp16's loss scaling."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val or float("inf"))
        self.gradient_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-token loss of `tokens [B, T + 1]`, in nats per token, averaged over the B * T predictions."""
        return self.built()(tokens[:, :-1], tokens[:, 1:])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """A training batch's loss, with what mixers add; with documents its part of the step's (`DocumentCollate`)."""
        tokens, cu_seqlens = batch["tokens"], batch.get("cu_seqlens")
        if cu_seqlens is None:
            parts = tokens[:, :-1], tokens[:, 1:]
            if self.piece is not None:
                parts = map(self.piece.cut, parts)
            return self.built()(*parts, added=1.0, piece=self.piece)
        rows = [rows.reshape(1, -1) for rows in (tokens[:, :-1], batch["targets"])]
        cu_seqlens = bound_documents(cu_seqlens, tokens.shape[1] - 1)
        scale = batch["loss_scale"]  # what mixers add is a mean over tokens, of which each batch has equally many
        piece = self.piece and self.piece.of_row(rows[0].shape[1])
        if piece is not None:  # the trainer takes the mean over processes, and each has the losses of its piece
            rows, scale = [piece.cut(each) for each in rows], scale * piece.size
        loss = self.built()(*rows, cu_seqlens=cu_seqlens, reduction="sum", added=1 / scale, piece=piece)
        self.built().added = {name: each * scale for name, each in self.built().added.items()}
        return loss * scale

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        # What a mixer's loss draws depends on the step only, so that a resumed run draws the same.
        place = self.global_step, batch_idx % self.trainer.accumulate_grad_batches, self.global_rank
        seed = hash((self._seed, *place)) % 2**63
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":  # torch.manual_seed formats a stack for each kind of device that is not there
            torch.get_device_module(self.device).manual_seed(seed)
        loss = self.loss(batch)
        self.log("loss", loss.detach(), logger=False)  # Lightning reads what `prog_bar` marks in each batch
        return {"loss": loss, "added": self.built().added}

    def validation_step(self, batch: int, batch_idx: int) -> None:
        self._evaluate(LossByDomain())

    def test_step(self, batch: int, batch_idx: int) -> None:
        self._evaluate(LossByDomain(whole=True))

    def scorer(self) -> Scorer:
        """The model in training as evaluation tasks see it, shared by the processes of the trainer."""
        trainer: Any = self.trainer
        batch_size = trainer.datamodule.batch_size(data_processes(trainer))
        return Scorer(
            self.built(),
            trainer.datamodule.tokenizer,
            context=trainer.precision_plugin.forward_context,
            batch_size=batch_size,
            max_tokens=batch_size * trainer.datamodule.sequence_length,
            length=trainer.datamodule.sequence_length,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            shared=self.piece,
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

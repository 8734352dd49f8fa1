"""`seqarch fit`, `validate` and `test`: Lightning's command line around a run folder."""

from __future__ import annotations

import sys
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, set_parsing_settings
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

import seqarch
from seqarch.cli.checks import check_accelerator, check_strategy, user_errors_of_lightning
from seqarch.cli.commands import COMMANDS, TRAINING, options_of
from seqarch.cli.messages import explain
from seqarch.cli.recipes import expand_recipes
from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError
from seqarch.evaluation.registry import import_tasks
from seqarch.mixers.registry import import_mixers
from seqarch.model import SequenceLM
from seqarch.plugins import ALLOW_CODE, FLAG, allow_flags, check_parsed, split_allowed, trust
from seqarch.report import report
from seqarch.report.runs import load_run
from seqarch.runs import tags
from seqarch.runs.layout import CONFIG, CURVES, TENSORBOARD, newest_checkpoint
from seqarch.runs.record import is_finished, read_record
from seqarch.training import LanguageModel
from seqarch.training.branches import unfinished_branches, write_branch_config
from seqarch.training.callbacks import (
    AttentionEntropy,
    Branches,
    NonFiniteGuard,
    OODLoss,
    RunCheckpoint,
    Throughput,
    TrainLoss,
)
from seqarch.training.checkpoint import other_model, read_checkpoint
from seqarch.training.curves import CurvesLogger
from seqarch.training.run_folder import RunFolder, check_same_run

CALLBACKS = {
    "ood_loss": OODLoss,
    "attention_entropy": AttentionEntropy,
    "train_loss": TrainLoss,
    "throughput": Throughput,
    "branches": Branches,
    "checkpoint": RunCheckpoint,
}
TRAINER_DEFAULTS = {
    "gradient_clip_val": 1.0,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "enable_model_summary": False,
}


class Progress(RichProgressBar):
    """Lightning's progress bar over the steps of the run, with the loss and tokens a second."""

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"

    @property
    def total_train_batches(self) -> int:
        """Batches of this epoch when it, or the run, ends; Lightning's count forgets those before a resume."""
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        left = (self.trainer.max_steps - self.trainer.global_step) * self.trainer.accumulate_grad_batches
        return int(min(self.trainer.num_training_batches, done + left))

    def get_metrics(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, Throughput) and callback.tokens_per_second:
                metrics["tokens/s"] = f"{callback.tokens_per_second:,.0f}"
        return metrics


class TrainingCLI(LightningCLI):
    """Parses a recipe, prepares the run folder, trains, and says what came out.

    Args:
        args: of the command line.
        run: train, or only build the model and the data.
        lm: a model of the same options to train on with, since it may be compiled already.
    """

    def __init__(self, args: list[str], run: bool = True, lm: SequenceLM | None = None) -> None:
        self.lm = lm
        self.given = args
        args, self.allow_code = split_allowed(args)
        trust(self.allow_code)
        import_mixers()  # so that a recipe may name a mixer by its class alone
        import_tasks()
        set_parsing_settings(add_print_completion_argument=True)
        self.wanted = [name for name in TRAINING if name in args[:1]]  # no parser is built for the others
        header = [f"seqarch=={seqarch.__version__}"]
        strict = {"exit_on_error": False, "dump_header": header}
        super().__init__(
            LanguageModel,
            TextDataModule,
            args=expand_recipes(args),
            run=run,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            trainer_defaults=TRAINER_DEFAULTS,
            parser_kwargs={
                **strict,
                "prog": "seqarch",
                "description": "Train and measure language models.",
                **{name: {**strict, **self._help_texts(name)} for name in self.subcommands()},
            },
        )

    @staticmethod
    def _help_texts(name: str) -> dict[str, str]:
        return {"description": TRAINING[name], "usage": f"seqarch {name} --config RECIPE [--KEY VALUE ...]"}

    def subcommands(self) -> dict[str, set[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The command that is run, or all to help and complete, each with arguments that are not the user's."""
        skip = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule", "weights_only"}
        return dict.fromkeys(self.wanted or TRAINING, skip)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--extends", type=_followed, default="", help=SUPPRESS)  # stands in recipes
        parser.add_argument("--allow_code", type=_of_command_line, default="", help=ALLOW_CODE)  # taken out before
        parser.add_argument("--run_dir", type=str | None, default=None, help="folder that the run is written to")
        for key, callback in CALLBACKS.items():
            parser.add_lightning_class_args(callback, key)

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Lightning's, but with `--config` after the command alone."""
        if not add_subcommands:
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
            return
        self.parser = self.parser_class(**main_kwargs)
        self._subcommand_method_arguments = {}
        self._add_subcommands(self.parser, **subparser_kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            parser = getattr(self, "_subcommand_parsers", {}).get(args[0], parser)
            raise UserError(explain(str(error), options_of(parser), args)) from error

    def before_instantiate_classes(self) -> None:
        if not self.subcommand:
            return
        config = self.config[self.subcommand]
        check_accelerator(config)
        check_strategy(config.trainer.strategy)
        if torch.cuda.is_available():
            torch.set_float32_matmul_precision("high")
        self.run_dir: Path | None = None
        if self.subcommand == "fit":
            self.run_dir = self._open_run()
            self._finish_branches()
        elif config.ckpt_path is None:
            raise UserError(f"{self.subcommand} needs --ckpt_path, a checkpoint of a run")
        elif other := other_model(read_checkpoint(config.ckpt_path), config.model.as_dict()):
            print(f"seqarch: warning: {config.ckpt_path} holds another model ({other})", file=sys.stderr)

    def _open_run(self) -> Path:
        """The run folder; the newest checkpoint in it is where `fit` goes on."""
        config = self.config["fit"]
        if not config.run_dir:
            raise UserError("fit needs --run_dir, the folder that the run is written to (for instance runs/first)")
        if config.trainer.max_steps < 1:
            given = "not set" if config.trainer.max_steps == -1 else config.trainer.max_steps
            raise UserError(f"trainer.max_steps is {given}: give the number of steps, at least 1")
        if config.data.seed is None:
            config.data.seed = config.seed_everything
        run_dir = Path(config.run_dir)
        if run_dir.exists() and not run_dir.is_dir():
            raise UserError(f"--run_dir {run_dir} is a file: name a folder, which need not exist")
        self._dump_config()
        check_same_run(run_dir, self.config_dump)
        if is_finished(run_dir):
            print(f"{run_dir} is already finished; another --run_dir trains again")
            print(outcome(run_dir))
            sys.exit(0)
        config.ckpt_path = config.ckpt_path or newest_checkpoint(run_dir)
        if config.ckpt_path and (other := other_model(read_checkpoint(config.ckpt_path), config.model.as_dict())):
            raise UserError(f"{config.ckpt_path} holds another model ({other}): give the options it was trained with")
        return run_dir

    def _finish_branches(self) -> None:
        """Train on with the branches that the run began, before it goes on itself."""
        assert self.run_dir is not None
        for branch in unfinished_branches(self.run_dir):
            write_branch_config(branch, self.config_dump)
            self.lm = type(self)(
                ["fit", f"--config={branch / CONFIG}", *allow_flags(self.allow_code)], lm=self.lm
            ).built()
            if not is_finished(branch):
                sys.exit(0)

    def _dump_config(self) -> None:
        super()._dump_config()
        for key in ("extends", "allow_code"):  # the one is resolved, the other never stands in a file
            self.config_dump.pop(key, None)

    def instantiate_classes(self) -> None:
        check_parsed(self.config, self.allow_code)
        with user_errors_of_lightning():
            if self.subcommand:
                super().instantiate_classes()
                self.model.lm = self.lm
            else:  # run=False: the model and the data, without a trainer, which would want its devices
                self.config_init = self.parser.instantiate_classes(self.config)
                self.model, self.datamodule = (self._get(self.config_init, key) for key in ("model", "data"))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[str(self.subcommand)]
        if config.trainer.accumulate_grad_batches != 1:
            raise UserError(
                "trainer.accumulate_grad_batches follows from data.sequences_per_step and data.micro_batch_size: "
                "set these"
            )
        callbacks: list[Any] = [*(config.trainer.callbacks or []), NonFiniteGuard()]
        if config.trainer.enable_progress_bar is not False:
            callbacks.append(Progress())
        loggers: list[Any] = []
        if self.run_dir is not None:
            loggers = _as_list(config.trainer.logger)
            loggers.append(TensorBoardLogger(self.run_dir, name="", version=TENSORBOARD))
            loggers.append(CurvesLogger(self.run_dir / CURVES))
            callbacks.append(RunFolder(self.run_dir, self.config_dump))
        extra = {"logger": loggers, "callbacks": callbacks, "default_root_dir": str(self.run_dir or ".")}
        with user_errors_of_lightning(of_trainer_options=True):
            return super().instantiate_trainer(**extra, **kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        with user_errors_of_lightning():
            super()._run_subcommand(subcommand)
        callbacks: Any = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        told_to_stop = any(isinstance(each, RunCheckpoint) and each.told_to_stop for each in callbacks)
        if self.run_dir is not None and unfinished_branches(self.run_dir) and not told_to_stop:
            type(self)(self.given, lm=self.built())

    def built(self) -> SequenceLM | None:
        """The model for another run of the same options; none where it is sharded over this run's processes."""
        return self.model.lm if self.model.device_mesh is None else None

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        return {**super()._prepare_subcommand_kwargs(subcommand), "weights_only": True}

    def before_fit(self) -> None:
        self.trainer.limit_val_batches = 0  # OODLoss measures; Lightning's loop is for `validate`
        self.trainer.accumulate_grad_batches = self.datamodule.accumulation(self.trainer.world_size)

    def after_fit(self) -> None:
        assert self.run_dir is not None
        if self.trainer.is_global_zero and not unfinished_branches(self.run_dir):
            print(outcome(self.run_dir))
        if any(isinstance(each, RunCheckpoint) and each.interrupted for each in self.trainer.callbacks):  # pyright: ignore
            raise KeyboardInterrupt

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Lightning's commands; to complete a command line the others too, in the same parser."""
        super()._add_subcommands(parser, **kwargs)
        for name, command in () if self.wanted else COMMANDS.items():
            subparser = LightningArgumentParser(description=command.help, exit_on_error=False)
            parser._subcommands_action.add_subcommand(name, subparser, help=command.help)  # pyright: ignore
            command.add_arguments(subparser)

    def _parse_ckpt_path(self) -> None:
        """Keep what was asked for: Lightning would let the checkpoint's hyperparameters override it."""


def outcome(run_dir: Path) -> str:
    """What a run came to, and where to look: printed when `fit` ends."""
    record = read_record(run_dir)
    if record["status"] != "finished":
        return f"stopped; the same command goes on from {newest_checkpoint(run_dir)}"
    run = load_run(run_dir)
    lines = [f"{record['name']}: {record['parameters']:,} parameters, {run.tokens:,} tokens"]
    for role, domains in ((tags.IN_DOMAIN, record["train"]), (tags.OOD, record["ood"])):
        for domain in domains:
            curve = run.curves.get(tags.loss(role, domain))
            if curve is None or not len(curve.value):
                continue
            entropy = record["unigram_entropy"][domain]
            kind = "in-domain" if role == tags.IN_DOMAIN else "OOD"
            lines.append(f"  {kind:9} {domain:12} {curve.value[-1]:.3f} nats a token  (unigram entropy {entropy:.3f})")
    try:
        lines.append(f"  plot         {report([run_dir], run_dir / 'report')[0]}")
    except UserError as error:  # the run went well: that it shows nothing to plot is no failure
        lines.append(f"  no plot      {error}")
    lines.append(f"  curves       {run_dir / CURVES}")
    lines.append(f"  TensorBoard  tensorboard --logdir {run_dir / TENSORBOARD}")
    return "\n".join(lines)


def _followed(extends: str) -> str:
    """The parsed value of `extends`: nothing, since the files it names are among the arguments by then."""
    return ""


def _of_command_line(packages: str) -> str:
    """The parsed value of `allow_code`: the command line's are taken out before, so this one is from a file."""
    if packages:
        raise ValueError(f"what code may run is said on the command line only: {FLAG} {packages}")
    return packages


def _as_list(logger: Any) -> list[Any]:
    if isinstance(logger, bool) or logger is None:
        return []
    return list(logger) if isinstance(logger, (list, tuple)) else [logger]

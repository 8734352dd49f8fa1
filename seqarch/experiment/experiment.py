"""`Experiment`: a recipe becomes a model, data and a run."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import seed_everything

from seqarch.arguments import typed
from seqarch.data.datamodule import TextDataModule
from seqarch.data.packing import as_documents
from seqarch.errors import SeqarchWarning, UserError, say, several
from seqarch.evaluation import Task
from seqarch.evaluation.registry import as_tasks
from seqarch.evaluation.results import values
from seqarch.experiment.checks import check_machine, check_memory, end_at_sigterm, running, user_errors_of_lightning
from seqarch.experiment.parser import plain, read_options, recipe_parser
from seqarch.experiment.run import (
    Start,
    build_trainer,
    open_run,
    outcome,
    recipe_of_run,
    starting_checkpoint,
    warn_after_finish,
)
from seqarch.experiment.tree import modules_of_classes
from seqarch.model import SequenceLM
from seqarch.plugins import check_parsed, split_allowed
from seqarch.runs.folder import is_finished, named_checkpoint, newest_checkpoint, status
from seqarch.runs.keys import flatten
from seqarch.runs.results import Value
from seqarch.training import LanguageModel
from seqarch.training.checkpoint import other_model, read_checkpoint
from seqarch.training.fsdp import data_processes
from seqarch.training.loggers import adapt_loggers
from seqarch.training.provenance import Provenance
from seqarch.training.run_folder import branch_config, branch_steps, unfinished_branches
from seqarch.training.weights import SUFFIX


class Experiment:
    """A recipe and what follows from it: the model, the data and the run.

    `Experiment.from_recipe` makes it from a file, a name or a mapping.

    Args:
        args: the command line of `seqarch fit` without the command.
        recipe: a recipe that `args` are laid over.
        overrides: values laid over both by their dotted keys.
        allow_code: packages whose classes the recipe may name, next to those of seqarch and plug-ins.
        parser: a `build_parser` with the words of a command.

    Raises:
        UserError: what is wrong in the arguments or a recipe.
    """

    @typed
    def __init__(
        self,
        args: str | Sequence[str],
        recipe: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        allow_code: str | Sequence[str] = (),
        parser: ArgumentParser | None = None,
    ) -> None:
        args, allowed = split_allowed(recipe_of_run(several(args)))
        modules = sorted(modules_of_classes([recipe or {}, overrides or {}]))  # whoever gives a class trusts it
        self.allow_code = (*several(allow_code), *allowed, *modules)
        named = {*(arg.partition("=")[0] for arg in args), *(f"--{key}" for key in flatten(overrides or {}))}
        self._names_root = bool(named & {"--data", "--data.root"})
        self._parser = parser or recipe_parser()
        self.options = read_options(self._parser, args, recipe, overrides, self.allow_code)
        """The recipe as it was parsed."""
        self._built: Namespace | None = None

    @classmethod
    @typed
    def from_recipe(
        cls,
        recipe: str | Path | Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        allow_code: str | Sequence[str] = (),
    ) -> "Experiment":
        """Read a recipe.

        Args:
            recipe: a file, the name of a bundled recipe such as "quickstart", or a mapping as a file would hold it.
            overrides: values laid over the recipe by their dotted keys: `{"trainer.max_steps": 100}`.
            allow_code: packages whose classes the recipe may name, next to those of seqarch and plug-ins.

        Raises:
            UserError: there is no such recipe, or something in it is wrong.
        """
        args, content = ([], recipe) if isinstance(recipe, Mapping) else (["--config", str(recipe)], None)
        return cls(args, content, overrides, allow_code=allow_code)

    def __repr__(self) -> str:
        model, folder = self.config["model"], self.run_folder
        mixers = ", ".join(spec["class_path"].rpartition(".")[2] for spec in model["mixers"].values())
        size = f"{model['n_layers']} layers of {mixers}, d_model {model['d_model']}"
        state = status(folder) if folder else ""
        run = f"run_dir {folder} ({'not begun' if state == 'missing' else state})" if folder else "no run_dir"
        return f"<Experiment: {size}, {self.options.trainer.max_steps} steps, {run}>"

    @property
    def config(self) -> dict[str, Any]:
        """The whole configuration as plain values, as `config.yaml` of a run folder holds it."""
        return plain(self._parser, self.options)

    @property
    def run_folder(self) -> Path | None:
        """The folder that `fit` writes to, if the recipe names one."""
        return Path(self.options.run_dir) if self.options.run_dir else None

    @property
    def model(self) -> LanguageModel:
        """The LightningModule; its weights are there once `fit` or `configure_model` has made them."""
        return self._parts.model

    @property
    def data(self) -> TextDataModule:
        """The data: training mixtures and evaluation sets."""
        return self._parts.data

    def build_on_meta(self) -> SequenceLM:
        """Return the model without memory for its weights, to count and check."""
        with torch.device("meta"):
            return self.model.build()

    def check(self) -> None:
        """Raise `UserError` for what is known to be wrong before anything is built."""
        check_machine(self.config)
        max_steps = self.options.trainer.max_steps
        self.model.check_schedule(max_steps)
        branch_steps(self.options.branches.at or [], self.model, max_steps)
        devices, context = str(self.options.trainer.devices), getattr(self._parts.trainer.strategy, "context", 1)
        self.data.accumulation(max(1, int(devices) // context) if devices.isdigit() else 1)

    def try_out(self) -> None:
        """Take two steps of one micro-batch as the recipe trains, on one device and whole there; keep nothing.

        Raises:
            UserError: this machine cannot train the model.
        """
        trainer: Any = build_trainer(self._parts, self.config, None)
        model, device, precision = self.model, trainer.strategy.root_device, trainer.precision_plugin
        model.trainer, trainer.datamodule = trainer, self.data
        model.setup("fit")
        check_memory(model, on_cpu=device.type == "cpu")
        tokens = torch.zeros(
            self.data.batch_size(data_processes(trainer)), self.data.sequence_length + 1, dtype=torch.int64
        )
        documents = as_documents(tokens, torch.ones_like(tokens)) if self.data.document_mask else {}
        batch = {name: each.to(device) for name, each in {"tokens": tokens, **documents}.items()}
        with user_errors_of_lightning():
            model.configure_model()
            precision.convert_module(model).to(device)
            optimizer = model.configure_optimizers()["optimizer"]
            for _ in range(2):  # AdamW's moments take memory from the second on
                with precision.train_step_context():
                    loss = model.loss(batch)
                loss.backward()
                model.configure_gradient_clipping(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
                optimizer.step()
                optimizer.zero_grad()

    def fit(self, *, figures: bool = True) -> Path:
        """Train, or resume where the run stopped. A finished run does not change. Return the run folder.

        Weights and data are made anew from the seed, whatever was done with `model` and `data` before.

        Args:
            figures: whether to draw the run's figures and print its final losses.

        Raises:
            UserError: the recipe cannot be trained here, or the folder holds another run.
            KeyboardInterrupt: Ctrl-C stopped the run, after it wrote a checkpoint.
        """
        return self._fit(figures, None)[0]

    def _fit(self, figures: bool, lm: SequenceLM | None) -> tuple[Path, SequenceLM | None]:
        """Train with a model of the same options, which may be compiled already; return the model for another run."""
        if self.options.data.seed is None:
            self.options.data.seed = self.options.seed_everything
        config = self.config
        run_dir = open_run(config, self._completed)
        if is_finished(run_dir):
            say(f"{run_dir} is already finished; another --run_dir trains again")
            if figures:
                say(outcome(run_dir))
            return run_dir, lm
        while True:
            start = starting_checkpoint(run_dir, config, self._completed)
            for branch in unfinished_branches(run_dir):  # before the run goes on itself
                _, lm = Experiment([], branch_config(branch, config), allow_code=self.allow_code)._fit(figures, lm)
                if not is_finished(branch):
                    return run_dir, lm
            told_to_stop, lm = self._train(run_dir, start, figures, lm)
            if told_to_stop or not unfinished_branches(run_dir):
                return run_dir, lm

    def _train(self, run: Path, start: Start, figures: bool, lm: SequenceLM | None) -> tuple[bool, SequenceLM | None]:
        """Train until the end or the next branch; whether a signal stopped it, and the model for another run."""
        checkpoint, weights = start
        self._seed()
        parts = self._instantiate(run)
        resumed = None if weights else checkpoint
        parts.model.lm = lm if resumed else None  # without a checkpoint it would keep the weights of a branch
        parts.model.origin = weights
        trainer = build_trainer(parts, self.config, run)
        if lm is None:
            check_memory(parts.model, on_cpu=trainer.strategy.root_device.type == "cpu")
        trainer.limit_val_batches = 0  # OODLoss measures; Lightning's loop is for `evaluate`
        trainer.accumulate_grad_batches = parts.data.accumulation(data_processes(trainer))
        with warn_after_finish(run), end_at_sigterm(trainer), running(trainer, checkpoint):
            trainer.fit(parts.model, datamodule=parts.data, ckpt_path=resumed, weights_only=True)
        if figures and trainer.is_global_zero and not unfinished_branches(run):
            with warn_after_finish(run):
                say(outcome(run))
        if parts.checkpoint.interrupted:
            raise KeyboardInterrupt
        # the model may be sharded over this run's processes
        return parts.checkpoint.told_to_stop, parts.model.lm if parts.model.device_mesh is None else None

    def _completed(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """A configuration of an earlier version with the defaults of options that came since."""
        try:
            return Experiment([], config, allow_code=self.allow_code).config
        except UserError:  # an option has gone since
            return config

    @typed
    def evaluate(
        self,
        tasks: Task | str | Sequence[Task | str] | None = None,
        checkpoint: str | Path | None = None,
        *,
        whole: bool = False,
        verbose: bool = False,
    ) -> dict[str, Value]:
        """Return the metrics of a checkpoint by their tags: numbers, with `low` and `high` of a 95 % interval.

        Args:
            tasks: what is scored: tasks, or words of `seqarch eval --tasks`. By default the loss by domain and the
                tasks of the recipe.
            checkpoint: a file; of a run folder the newest. By default the run's newest, else the recipe's `ckpt_path`.
            whole: without tasks, take the whole hold-out of each domain, not the evaluation set.
            verbose: print the file and a table too.

        Raises:
            UserError: there is no checkpoint, or it does not fit the recipe.
        """
        self._seed()
        if checkpoint is None:
            checkpoint = (self.run_folder and newest_checkpoint(self.run_folder)) or self.options.ckpt_path
        if checkpoint is None:
            raise UserError("there is no checkpoint to evaluate: name one, or train first")
        # Lightning takes "last", "best" and URLs for other files
        checkpoint = os.path.abspath(named_checkpoint(checkpoint))
        if checkpoint.endswith(SUFFIX):  # Lightning reads none
            raise UserError(f"{checkpoint} is a file of weights, for eval and generate: name a checkpoint")
        config = self.config
        content = read_checkpoint(checkpoint, weights=False)
        if other := other_model(content, config, self._completed):
            warnings.warn(f"{checkpoint} holds another model ({other})", SeqarchWarning, stacklevel=3)
        parts = self._instantiate()
        Provenance.of_checkpoint(content).find(parts.data, Path(checkpoint), named=self._names_root)
        trainer = build_trainer(parts, config, None)
        parts.model.prepare_inference(compiled=True)
        parts.model.tasks = as_tasks(tasks) if tasks else None
        measure = trainer.test if whole else trainer.validate
        if verbose and trainer.is_global_zero:
            say(f"measures {checkpoint} on the text in {parts.data.root}")
        with running(trainer, checkpoint):
            measure(parts.model, datamodule=parts.data, ckpt_path=checkpoint, verbose=verbose, weights_only=True)
        if parts.model.scores is None:
            raise UserError("trainer.limit_val_batches or limit_test_batches is 0 and measures nothing: leave it out")
        return values(parts.model.scores)

    @property
    def _parts(self) -> Namespace:
        if self._built is None:
            self._seed()
            self._built = self._instantiate()
        return self._built

    def _seed(self) -> None:
        seed_everything(self.options.seed_everything, workers=True, verbose=False)

    def _instantiate(self, run_dir: Path | None = None) -> Namespace:
        """New objects of every section but the trainer; loggers are made for a run folder only."""
        if torch.cuda.is_available():
            torch.set_float32_matmul_precision("high")
        check_parsed(self.options, self.allow_code)
        options = self.options.clone()
        if run_dir is None:
            options.trainer.logger = None
        else:
            adapt_loggers(several(options.trainer.logger), run_dir)
        with user_errors_of_lightning():
            self._built = self._parser.instantiate(options)
        self._built.model.save_hyperparameters(self.config["model"], logger=False)  # loggers get the whole config
        return self._built

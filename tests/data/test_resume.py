"""After a resume, the batches equal those of the uninterrupted run bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError

ONE = {"web": 1.0}
TWO = {"web": 3.0, "code": 1.0}


class Recorder(lightning.LightningModule):
    """Remembers the batches it is given; its one weight makes an optimizer step possible."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches: list[tuple[list, list]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.batches.append((batch["tokens"].tolist(), batch["sample"].tolist()))
        return self.weight * batch["tokens"].float().mean()

    def validation_step(self, batch: int, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluation between the steps, which must not move the position."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scheduled(Recorder):
    """Asks the trainer for its number of steps. Lightning then forgets the state of the loaders that it resumes."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class SaveAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def make_data(root: Path, train: dict[str, float], **options: Any) -> TextDataModule:
    defaults: dict[str, Any] = {
        "sequence_length": 32,
        "sequences_per_step": 8,
        "eval_tokens": 256,
        "ood": ["far"],
        "seed": 5,
    }
    return TextDataModule(str(root), train, **{**defaults, **options})


def steps_per_epoch(root: Path, train: dict[str, float]) -> int:
    return len(make_data(root, train).train_dataloader())


def fit(
    data: TextDataModule,
    folder: Path,
    *callbacks: Callback,
    model: Recorder | None = None,
    resume: Path | None = None,
    **options: Any,
) -> Recorder:
    model = model or Recorder()
    trainer = lightning.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=data.accumulation(1),
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, datamodule=data, ckpt_path=resume, weights_only=True)
    return model


@pytest.mark.commands
@pytest.mark.parametrize(
    ("train", "num_workers", "where"),
    [(ONE, 0, "mid_epoch"), (TWO, 0, "epoch_boundary"), (ONE, 0, "second_epoch"), (TWO, 2, "second_epoch")],
)
def test_resume_is_exact(shards: Path, tmp_path: Path, train: dict[str, float], num_workers: int, where: str) -> None:
    epoch = steps_per_epoch(shards, train)
    stop = {"mid_epoch": 3, "epoch_boundary": epoch, "second_epoch": epoch + 2}[where]
    checkpoint = tmp_path / "stopped.ckpt"
    options: dict[str, Any] = {"num_workers": num_workers, "micro_batch_size": 4}
    whole = fit(make_data(shards, train, **options), tmp_path, SaveAt(stop, checkpoint), max_steps=epoch + 5)
    rest = fit(make_data(shards, train, **options), tmp_path, resume=checkpoint, max_steps=epoch + 5)
    assert len(whole.batches) == 2 * (epoch + 5)
    assert rest.batches == whole.batches[2 * stop :]
    assert rest.weight.item() == whole.weight.item()


def test_resume_does_not_rest_on_the_state_of_loaders(shards: Path, tmp_path: Path) -> None:
    epoch = steps_per_epoch(shards, ONE)
    checkpoint = tmp_path / "stopped.ckpt"
    whole = fit(make_data(shards, ONE), tmp_path, SaveAt(3, checkpoint), model=Scheduled(), max_epochs=2)
    rest = fit(make_data(shards, ONE), tmp_path, model=Scheduled(), resume=checkpoint, max_epochs=2)
    assert len(whole.batches) == 2 * epoch
    assert rest.batches == whole.batches[3:]


def test_another_fit_starts_at_the_beginning(shards: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "stopped.ckpt"
    data = make_data(shards, TWO)
    first = fit(data, tmp_path, SaveAt(2, checkpoint), max_steps=3)
    rest = fit(data, tmp_path, resume=checkpoint, max_steps=3)
    again = fit(data, tmp_path, max_steps=3)
    assert rest.batches == first.batches[2:]
    assert again.batches == first.batches


def test_resume_with_more_workers_is_exact(shards: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "stopped.ckpt"
    whole = fit(make_data(shards, TWO), tmp_path, SaveAt(2, checkpoint), max_steps=5)
    rest = fit(make_data(shards, TWO, num_workers=2), tmp_path, resume=checkpoint, max_steps=5)
    assert rest.batches == whole.batches[2:]


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        (ONE, {}, r"train is .* but was .* when the checkpoint was written"),
        ({"web": 1.0, "code": 1.0}, {}, "train is"),
        ({"code": 1.0, "web": 3.0}, {}, "train is {'code': 1.0, 'web': 3.0} but was {'web': 3.0, 'code': 1.0}"),
        (TWO, {"seed": 6}, "seed is 6 but was 5"),
        (TWO, {"sequence_length": 16}, "sequence_length is 16 but was 32"),
        (TWO, {"sequences_per_step": 4}, "sequences_per_step is 4 but was 8"),
        (TWO, {"shuffle_window": 2}, "shuffle_window is 2 but was None"),
    ],
)
def test_resume_over_other_data_is_refused(
    shards: Path, tmp_path: Path, train: dict[str, float], options: dict[str, Any], message: str
) -> None:
    checkpoint = tmp_path / "stopped.ckpt"
    fit(make_data(shards, TWO), tmp_path, SaveAt(2, checkpoint), max_steps=2)
    with pytest.raises(UserError, match=message):
        fit(make_data(shards, train, **options), tmp_path, resume=checkpoint, max_steps=4)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_the_position_holds_with_other_micro_batches(shards: Path, micro_batch_size: int) -> None:
    """As with another number of devices: a step has the same samples."""
    data, other = make_data(shards, TWO), make_data(shards, TWO, micro_batch_size=micro_batch_size)
    batches = iter(data.train_dataloader())
    for _ in range(3):
        next(batches)
    other.load_state_dict(data.state_dict())
    expected = [row for batch in batches for row in batch["sample"].tolist()]
    assert [row for batch in other.train_dataloader() for row in batch["sample"].tolist()] == expected


def test_a_checkpoint_within_a_step_takes_the_same_micro_batches(shards: Path) -> None:
    data = make_data(shards, TWO, micro_batch_size=4)
    next(iter(data.train_dataloader()))
    other = make_data(shards, TWO)
    other.load_state_dict(data.state_dict())
    with pytest.raises(UserError, match=r"lies within a step: resume with data.micro_batch_size x devices 4"):
        other.train_dataloader()


def test_resume_over_other_shards_is_refused(shards: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "stopped.ckpt"
    fit(make_data(shards, ONE), tmp_path, SaveAt(2, checkpoint), max_steps=2)
    root = tmp_path / "root"
    for domain, source in {"web": "code", "far": "far"}.items():
        shutil.copytree(shards / source, root / domain)
    with pytest.raises(UserError, match=r"shards is .* when the checkpoint was written: resume with the same"):
        fit(make_data(root, ONE), tmp_path, resume=checkpoint, max_steps=4)


def test_accumulation_that_contradicts_the_data_is_refused(shards: Path, tmp_path: Path) -> None:
    data = make_data(shards, ONE, micro_batch_size=2)
    trainer = lightning.Trainer(accelerator="cpu", max_steps=1, logger=False, default_root_dir=tmp_path)
    with pytest.raises(UserError, match=r"trainer\.accumulate_grad_batches must be 4, as data"):
        trainer.fit(Recorder(), datamodule=data)

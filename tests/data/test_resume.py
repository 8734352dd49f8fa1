"""The batches after a resume are, to the bit, those of the run that was never interrupted."""

from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from seqarch.data.datamodule import TextDataModule

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

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        assert batch["tokens"].dtype == torch.int64

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def make_data(root: Path, train: dict[str, float], **options) -> TextDataModule:
    defaults = {"sequence_length": 32, "sequences_per_step": 8, "eval_tokens": 256, "ood": ["far"], "seed": 5}
    return TextDataModule(str(root), train, **{**defaults, **options})


def fit(
    data: TextDataModule, steps: int, folder: Path, *callbacks: Callback, resume: Path | None = None, **options
) -> Recorder:
    model = Recorder()
    trainer = lightning.Trainer(
        max_steps=steps,
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


def steps_per_epoch(root: Path, train: dict[str, float]) -> int:
    return len(make_data(root, train).train_dataloader())


@pytest.mark.parametrize("train", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("where", ["mid_epoch", "epoch_boundary", "second_epoch"])
def test_resume_is_exact(shards: Path, tmp_path: Path, train: dict[str, float], num_workers: int, where: str) -> None:
    epoch = steps_per_epoch(shards, train)
    stop = {"mid_epoch": 3, "epoch_boundary": epoch, "second_epoch": epoch + 2}[where]
    checkpoint = tmp_path / "stopped.ckpt"
    options = {"num_workers": num_workers, "micro_batch_size": 4}
    whole = fit(make_data(shards, train, **options), epoch + 5, tmp_path, SaveAt(stop, checkpoint))
    rest = fit(make_data(shards, train, **options), epoch + 5, tmp_path, resume=checkpoint)
    assert len(whole.batches) == 2 * (epoch + 5)
    assert rest.batches == whole.batches[2 * stop :]
    assert rest.weight.item() == whole.weight.item()

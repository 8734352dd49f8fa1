"""Best learning rates at several widths, with and without `model.base_width`, on a CPU.

    python -m benchmarks.transfer --widths 32 64 128 --csv benchmarks/transfer.csv

Trains the recipe `quickstart` with two layers and heads of 16 for 250 steps of 1,024 bytes, and measures its hold-out.
Rows that the file has already are not made again. At the base width both rules are the same model.
`benchmarks/transfer_predictions.csv` was written before. It has the ratio of the best rates at two widths. A
`loss_at_rate_of_32` is a loss at the best rate of width 32, less the best loss of its width.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

from benchmarks import script
from seqarch.experiment.experiment import Experiment
from seqarch.runs.curves import read_rows
from seqarch.tables import read_csv, write_csv

COLUMNS = ("mixer", "base_width", "width", "learning_rate", "loss")
MIXERS = {
    "Attention": lambda width: {"n_heads": width // 16},
    "Mamba2": lambda width: {"head_dim": 16, "d_state": 16},
    "DeltaNet": lambda width: {"n_heads": width // 16},
}


def loss(mixer: str, base_width: int | None, width: int, rate: float, folder: Path) -> float:
    """Loss on the hold-out of `docs` at the end of a run, in nats per byte."""
    experiment = Experiment.from_recipe(
        "quickstart",
        {
            "run_dir": str(folder / f"{mixer}-{base_width}-{width}-{rate}"),
            "trainer.max_steps": 250,
            "trainer.accelerator": "cpu",
            "trainer.enable_progress_bar": False,
            "model.d_model": width,
            "model.n_layers": 2,
            "model.mixers": {"mixer": {"class_path": mixer, "init_args": MIXERS[mixer](width)}},
            "model.learning_rate": rate,
            "model.base_width": base_width,
            "model.warmup_steps": 25,
            "data.ood": ["names"],
            "data.sequence_length": 128,
            "data.sequences_per_step": 8,
            "ood_loss.at": [1.0],
            "ood_loss.every_n_steps": 0,
            "attention_entropy.every_n_steps": 0,
        },
    )
    run = experiment.fit(figures=False)
    return float(read_rows(run / "curves.csv")[1][-1]["loss/in_domain/docs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixer", choices=MIXERS, default="Attention")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4 * 2**power for power in range(8)])
    parser.add_argument("--base_widths", type=int, nargs="+", default=[32, 0], help="0 for no rule")
    parser.add_argument("--csv", type=Path, default=Path("transfer.csv"))
    options = parser.parse_args()
    rows = [[row[name] for name in COLUMNS] for row in read_csv(options.csv)] if options.csv.is_file() else []
    with tempfile.TemporaryDirectory() as folder:
        for base, width, rate in itertools.product(options.base_widths, options.widths, options.rates):
            point = [options.mixer, str(base), str(width), f"{rate:g}"]
            if point in [row[:4] for row in rows]:
                continue
            rows.append([*point, f"{loss(options.mixer, base or None, width, rate, Path(folder)):.4f}"])
            write_csv(options.csv, COLUMNS, rows)
            print(*rows[-1])


if __name__ == "__main__":
    script.run(main)

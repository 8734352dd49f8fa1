"""`seqarch bench mixers`: a training step of each recipe, each in a process of its own, as one table of rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqarch.bench.jobs import Job, Row, Table, report_failures, run_job, shown
from seqarch.data.verified import cache_folder
from seqarch.errors import one_line, unknown
from seqarch.experiment.recipes import SIZE, bundled_recipes, find_recipe, merged_recipe, mixer_classes
from seqarch.plugins import MIXERS, entries
from seqarch.runs.files import replaced, write_text

COLUMNS = (
    *("name", "of", "model", "parameters", "precision", "micro_batch_size", "sequence_length", "documents"),
    *("steps", "start_up_s", "tokens_per_s", "p20", "p80", "mfu", "flops_counted", "peak_gib"),
    *("loss_first", "loss_last", "times_fla", "error"),
)


def recipe_job(
    recipe: Path, overrides: Mapping[str, Any], steps: int, allow_code: Sequence[str] = (), documents: int | None = None
) -> Job:
    """The job that times a recipe; arguments as for `seqarch.bench.training_step.time_recipe`."""
    options: dict[str, Any] = {"recipe": str(recipe), "overrides": overrides, "steps": steps}
    options |= {"allow_code": list(allow_code), "documents": documents}
    return Job(recipe.stem, "seqarch.bench.training_step:time_recipe", options)


def find_recipes(names: Sequence[str]) -> list[Path]:
    """Return the recipes that names mean: files, bundled recipes or mixers; without names, all of 110M parameters.

    A mixer means the bundled recipes of 110M parameters that have it. Any other registered mixer gets one.

    Raises:
        UserError: a name is not among these.
    """
    bundled = bundled_recipes()
    sized = {path: mixer_classes(merged_recipe(path)) for name, path in bundled.items() if name.endswith(SIZE)}
    chosen: list[Path] = [] if names else list(sized)
    for name in names:
        if of_mixer := [path for path, classes in sized.items() if name in classes]:
            chosen += of_mixer
        elif name.endswith((".yaml", ".yml")) or name in bundled or name + SIZE in bundled:
            chosen.append(find_recipe(name))
        elif name in entries(MIXERS):
            chosen.append(write_recipe(name))
        else:
            raise unknown("recipe or mixer", name, {*bundled, *entries(MIXERS)})
    return list(dict.fromkeys(chosen))


def write_recipe(mixer: str) -> Path:
    """Write a recipe of 110M parameters with this mixer at its defaults into the cache; return the file."""
    folder, name = cache_folder() / "bench", f"{mixer}.yaml"
    with replaced(folder) as new:  # two commands may write it at once
        write_text(new / name, f"extends: base/110m.yaml\nmodel:\n  mixers:\n    mixer: {mixer}\n")
    return folder / name


def bench_mixers(
    jobs: Sequence[Job], csv: Path | None = None, *, against_fla: bool = False, own_caches: bool = False
) -> list[Row]:
    """Run each job, and fla's model next to it where there is one; print each row and write all to `csv`.

    Args:
        jobs: what to run, in this order.
        csv: the CSV file.
        against_fla: whether fla's models are timed as well.
        own_caches: whether compile caches of earlier runs are used; otherwise each process starts with empty ones.

    Raises:
        UserError: no job ran, with the reason of the first.
        SystemExit: some jobs did not run.
    """
    table = Table(COLUMNS, csv, line)
    for job in jobs:
        ours = run_job(job, own_caches)
        published = _counterparts(job, ours) if against_fla and "error" not in ours else []
        theirs = [table.add(run_job(each, own_caches)) for each in published]
        if rates := [row["tokens_per_s"] for row in theirs if "error" not in row]:
            ours["times_fla"] = ours["tokens_per_s"] / max(rates)
        table.add(ours)
    errors = [row["error"] for row in table.rows if "error" in row and row["of"] == "seqarch"]
    report_failures(errors, len(jobs), "recipes were not run")
    return table.rows


def line(row: Row) -> str:
    """A row for the terminal."""
    name = f"{row['name']:28s} {row['of']:8s} {row.get('precision', ''):10s}"
    if "error" in row:
        return f"{name} not run: {one_line(row['error'])}"
    return shown(
        {**row, "head": name, "millions": row["parameters"] / 1e6},
        "{head} {tokens_per_s:10,.0f} tokens/s  [{p20:,.0f}, {p80:,.0f}]",
        "MFU {mfu:.0%} (counted)" if row.get("flops_counted") else "MFU {mfu:.0%}",
        "{peak_gib:.1f} GiB",
        "first step {start_up_s:.1f} s  {millions:.1f}M parameters  loss {loss_first:.3f} to {loss_last:.3f}",
        "{times_fla:.2f} x fla",
    )


def _counterparts(job: Job, ours: Row) -> list[Job]:
    """Return the jobs of fla's model of a recipe, one per precision; none if fla has no such model."""
    from seqarch.bench.fla_models import COUNTERPARTS, PRECISIONS

    if job.name not in COUNTERPARTS:
        return []
    options = {"name": job.name, **{key: ours[key] for key in ("micro_batch_size", "sequence_length", "steps")}}
    time = "seqarch.bench.fla_models:time_model"
    return [Job(job.name, time, {**options, "precision": each}, "fla") for each in PRECISIONS]

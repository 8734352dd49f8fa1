"""Finds tasks: every installed package that declares an entry point of the group `seqarch.tasks` provides one."""

import warnings
from collections.abc import Sequence
from typing import Any

from seqarch.errors import SeqarchWarning, UserError, several, unknown
from seqarch.evaluation.task import Asked, Task, ready_of
from seqarch.plugins import import_all

GROUP = "seqarch.tasks"
ALL = "all"


def import_tasks() -> dict[str, type[Task]]:
    """Import every declared task, so that a recipe may name its bare class; a broken one is left out with a warning."""
    return import_all(GROUP, Task)


def every_task(asked: Asked) -> list[Task]:
    """Every task that `seqarch eval` knows, group by group."""
    tasks = [task for kind in import_tasks().values() for task in kind.variants(asked)]
    return sorted(tasks, key=lambda task: task.group)


def tasks_named(names: str | Sequence[str], asked: Asked | None = None) -> list[Task]:
    """The tasks that these words mean: a task, a group of tasks, a class of tasks, or "all".

    Raises:
        UserError: a word is unknown.
    """
    tasks, words = every_task(asked or Asked()), several(names)
    found: dict[str, Task] = {}
    for name in words:
        named = [task for task in tasks if name in (task.name, task.group, type(task).__name__, ALL)]
        if not named:
            known = dict.fromkeys([ALL, *(task.group for task in tasks), *(task.name for task in tasks)])
            raise UserError(f"{unknown('task', name, known)} (--list shows every task)")
        found |= {task.name: task for task in named}
    if not found:
        raise UserError("no task is named: give --tasks, or --list to see them")
    for task in found.values():
        task.by_group = task.name not in words
    return list(found.values())


def with_rows(names: str | Sequence[str], asked: Asked | None = None) -> list[Task]:
    """The tasks that words mean, without those of a group that have no rows; a warning names these.

    Raises:
        UserError: a word is unknown, or a task that is named itself has no rows, or none has.
    """
    found, missing = ready_of(tasks_named(names, asked), lambda task: task.row_files())
    if missing:
        names = ", ".join(missing)
        warnings.warn(f"left out without rows: {names} (--list says how to get them)", SeqarchWarning, stacklevel=3)
    return found


def check_asked(asked: Asked, tasks: Sequence[Task]) -> None:
    """Raise `UserError` if an option that was given has no effect on the tasks."""
    for option, value in vars(asked).items():
        if value is not None and not any(_reads(type(task), option) for task in tasks):
            raise UserError(f"--{option} has no effect on {', '.join(task.name for task in tasks)}: leave it out")


def _reads(kind: type[Task], option: str) -> bool:
    """Whether the tasks of a class depend on an option of `Asked`."""
    read: set[str] = set()

    class Watched(Asked):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    kind.variants(Watched())
    return option in read


def as_tasks(tasks: Task | str | Sequence[Task | str]) -> list[Task]:
    """Tasks, with those that a word means in its place; errors as those of `tasks_named`."""
    return [task for each in several(tasks) for task in ([each] if isinstance(each, Task) else with_rows(each))]

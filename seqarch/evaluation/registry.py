"""Finds tasks: every installed package that declares an entry point of the group `seqarch.tasks` provides one."""

from seqarch.evaluation.task import Task
from seqarch.plugins import import_all, load

GROUP = "seqarch.tasks"


def load_task(name: str) -> type[Task]:
    """Import the task class of that name.

    Raises:
        UserError: the name is unknown, or what it stands for cannot be imported, is no `Task`, or has another name.
    """
    return load(GROUP, name, Task)


def import_tasks() -> dict[str, type[Task]]:
    """Import every declared task, so that a recipe may name its bare class; a broken one is left out with a warning."""
    return import_all(GROUP, Task)

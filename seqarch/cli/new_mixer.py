"""`seqarch mixers new NAME`: a package with your own mixer, ready to install, test and train."""

import keyword
import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from seqarch.errors import UserError
from seqarch.plugins import MIXERS, described, entries
from seqarch.runs.files import check_new

FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "$module.py": "module.py",
    "test_$module.py": "test_module.py",
    "$module.yaml": "recipe.yaml",
}
"""Files of the package, each with its template in `templates/mixer`."""


def new_mixer(name: str, out: Path | None = None) -> list[Path]:
    """Write a package with the mixer `name`.

    Args:
        name: the class, such as `RunningMean`.
        out: the folder, new or empty; by default the package's name, such as `running-mean`.

    Returns:
        The files that were written.

    Raises:
        UserError: the name is not a class name or is taken, or the folder is not empty.
    """
    if not _is_class_name(name):
        capital = name[:1].upper() + name[1:]
        right = capital if _is_class_name(capital) else "RunningMean"
        raise UserError(f"'{name}' is not a name for a class: write it as in {right}")
    if taken := entries(MIXERS).get(name):
        raise UserError(f"there is a mixer {name} already, in {described(taken)}: choose another name")
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    if keyword.iskeyword(module) or find_spec(module):
        raise UserError(f"the module of {name} would be {module}, which Python has already: choose another name")
    words = {"mixer": name, "module": module, "package": module.replace("_", "-")}
    folder = out or Path(words["package"])
    check_new(folder, "folder")
    folder.mkdir(parents=True, exist_ok=True)
    templates = files("seqarch.cli") / "templates" / "mixer"
    written = []
    for target, template in FILES.items():
        path = folder / Template(target).substitute(words)
        text = (templates / f"{template}.template").read_text(encoding="utf-8")
        path.write_text(Template(text).substitute(words), encoding="utf-8")
        written.append(path)
    return written


def _is_class_name(name: str) -> bool:
    return bool(re.fullmatch(r"[A-Z][A-Za-z0-9]*", name)) and not keyword.iskeyword(name) and name != "Mixer"

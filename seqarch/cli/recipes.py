"""Recipes that build on others: `extends: base/110m.yaml` in a file is that file, then this one over it."""

from __future__ import annotations

from pathlib import Path

import yaml

from seqarch.errors import UserError

FLAGS = ("--config", "-c")


def expand_recipes(args: list[str]) -> list[str]:
    """The arguments with every `--config FILE` preceded by the files that FILE extends, the furthest first."""
    expanded: list[str] = []
    rest = iter(args)
    for arg in rest:
        flag, _, value = arg.partition("=")
        if flag not in FLAGS:
            expanded.append(arg)
            continue
        value = value or next(rest, "")
        for path in _chain(Path(value)) if value else []:
            expanded += ["--config", str(path)]
        if not value:
            expanded.append(arg)
    return expanded


def _chain(path: Path) -> list[Path]:
    chain = [path]
    while (extends := _extends(chain[0])) is not None:
        base = chain[0].parent / extends
        if not base.is_file():
            raise UserError(f"{chain[0]} extends {extends}, but there is no file {base}")
        if base.resolve() in {each.resolve() for each in chain}:
            raise UserError(f"{chain[0]} extends {extends}, which extends it in turn")
        chain.insert(0, base)
    return chain


def _extends(path: Path) -> str | None:
    if not path.is_file():
        raise UserError(f"there is no recipe {path}")
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line} is no valid YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no keys: a recipe looks like 'model: ...', 'data: ...'")
    extends = content.get("extends")
    if extends is not None and not isinstance(extends, str):
        raise UserError(f"{path}: extends must name one file, not {extends!r}")
    return extends

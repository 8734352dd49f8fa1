"""What usually cures a mixer that fails a test of `MixerSuite`: `cures.md` says it, test by test."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_, *_SECTIONS = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").split("\n## ")
CURES = {each.partition("\n")[0]: re.findall(r"^\* (.+)", each, re.MULTILINE) for each in _SECTIONS}
"""By the name of the test, most likely first."""


def with_cures(suite: type) -> type:
    """Let each test of a suite that fails print its cures as well."""
    for name in [name for name in vars(suite) if name.startswith("test_")]:
        setattr(suite, name, _cured(vars(suite)[name], CURES[name]))
    return suite


def _cured(test: Callable[..., None], cures: list[str]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        try:
            test(*args, **options)
        except Exception as error:
            error.add_note("\n".join(("usual cures:", *(f"* {cure}" for cure in cures))))
            raise

    return run

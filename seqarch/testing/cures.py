"""What usually cures a mixer that fails a test of `MixerSuite`: `cures.md` says it, test by test."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

_, *_SECTIONS = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").split("\n## ")
CURES = {each.partition("\n")[0]: re.findall(r"^\* (.+)", each, re.MULTILINE) for each in _SECTIONS}
"""By the name of the test, most likely first."""


def with_cures(suite: type) -> type:
    """Let each test of a suite that fails print its cures as well."""
    for name in [name for name in vars(suite) if name.startswith("test_")]:
        setattr(suite, name, _cured(CURES[name])(vars(suite)[name]))
    return suite


@contextlib.contextmanager
def _cured(cures: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note("\n".join(("usual cures:", *(f"* {cure}" for cure in cures))))
        raise

"""Arguments of wrong types are refused before anything is done, with an error that is a TypeError too."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import seqarch
from seqarch.arguments import typed
from seqarch.errors import UserError

public: Any = seqarch  # to pyright, any argument fits


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: public.compare(3), r"^runs must be Sequence\[str \| Path\] \| Path, not 3$"),
        (lambda: public.compare(["run", None]), r"^runs must be .*, not \['run', None\]$"),
        (lambda: public.compare("run", reference=3), "^reference must be str | None, not 3$"),
        (lambda: public.load(b"run"), "^checkpoint must be str | Path, not b'run'$"),
        (lambda: public.load("run", allow_code=[3]), "^allow_code must be "),
        (lambda: public.generate_text(3, None, "a"), "^lm must be SequenceLM, not 3$"),
        (lambda: public.Experiment(3), "^args must be "),
        (lambda: public.Experiment.from_recipe(None), "^recipe must be "),
        (lambda: public.Experiment.from_recipe("quickstart", ["trainer"]), "^overrides must be "),
        (lambda: public.Experiment.from_recipe("quickstart").evaluate(3), "^tasks must be "),
    ],
)
def test_wrong_types_are_refused(call, said):
    with pytest.raises(UserError, match=said) as refused:
        call()
    assert isinstance(refused.value, TypeError)


def test_what_counts_as_a_type():
    def checked(number: int, ratio: float, path: Path, any_type, texts: list[str] | None = None, flag: bool = False):
        return number, ratio, path, any_type, texts, flag

    count: Any = typed(checked)
    arguments = (np.int64(3), np.float32(0.5), Path("a"), object(), ["a"], np.True_)
    assert count(*arguments) == arguments
    with pytest.raises(UserError, match=r"^number must be int, not 0\.5$"):
        count(0.5, 0.5, Path(), None)
    with pytest.raises(TypeError, match="missing a required argument"):
        count(3)

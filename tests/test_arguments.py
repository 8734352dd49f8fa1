"""Arguments of wrong types are refused before anything is done, with an error that is a TypeError too."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

import seqarch
from seqarch.arguments import COUNT, FILLED, Count, Interval, Limited, Positive, Share, typed
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


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "words"),
    [
        (Interval(1), [1, 2**70], [0, math.nan], "be at least 1"),
        (Interval(0, math.inf, "()"), [1e-300], [0, -1, math.inf, math.nan], "be positive"),
        (Interval(1, math.inf, "()"), [1.5], [1, math.inf], "be above 1"),
        (Interval(0, 1), [0, 0.5], [1, -0.1], r"lie in 0\.\.1, 1 excluded"),
        (Interval(0, 1, "()"), [0.5], [0, 1], r"lie in 0\.\.1, 0 and 1 excluded"),
        (Interval(1, 9, "[]"), [1, 9], [0, 10], r"lie in 1\.\.9"),
    ],
)
def test_an_interval_names_what_it_takes(limits, inside, outside, words):
    for number in (*inside, None):
        limits.check("size", number)
    for number in outside:
        finite = "" if math.isfinite(number) else ", and finite"
        with pytest.raises(UserError, match=rf"^size must {words}{finite}, not {re.escape(str(number))}$"):
            limits.check("size", number)
    with pytest.raises(UserError, match=r"^size must be at least 1, and at most 9,223,372,036,854,775,807, not "):
        COUNT.check("size", 2**63)


class Base(Limited):
    option_prefix = "{}."

    def __init__(self, size: Count = 1, kind: Literal["a", "b"] | None = None) -> None:
        self.size, self.kind = size, kind


class Derived(Base):
    def __init__(
        self,
        shares: list[Share] | None = None,
        rates: dict[str, Positive] | None = None,
        names: Annotated[list[str], FILLED] | None = None,
        **options,
    ) -> None:
        super().__init__(**options)
        self.shares, self.rates, self.names = shares, rates, names


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Base(0), "Base.size must be at least 1, not 0"),
        (lambda: Base(True), "Base.size must be at least 1, not True"),
        (lambda: Base(kind=public_value("c")), "Base.kind must be a, b or null, not c"),
        (lambda: Derived(size=0), "Derived.size must be at least 1, not 0"),
        (lambda: Derived([0.5, 0.0]), "Derived.shares must lie in 0..1, 0 excluded, not 0.0"),
        (lambda: Derived(rates={"web": -1.0}), "Derived.rates.web must be positive, not -1.0"),
        (lambda: Derived(rates={"web": math.inf}), "Derived.rates.web must be positive, and finite, not inf"),
        (lambda: Derived(names=[]), "Derived.names is empty: give it a value"),
    ],
)
def test_a_constructor_refuses_what_its_annotations_exclude(call, said):
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        call()


def test_annotations_may_be_texts():
    """As with `from __future__ import annotations`."""

    class Late(Limited):
        def __init__(self, size: "Count" = 1) -> None:
            self.size = size

    assert Late(2).size == 2
    with pytest.raises(UserError, match=r"^size must be at least 1, not 0$"):
        Late(0)


def test_a_constructor_takes_what_its_annotations_allow():
    made = Derived([1.0], {"web": 0.1}, size=3, kind="b")
    assert (made.size, made.kind, made.shares, made.rates) == (3, "b", [1.0], {"web": 0.1})


def public_value(value: Any) -> Any:
    """A value of a type that pyright does not check."""
    return value

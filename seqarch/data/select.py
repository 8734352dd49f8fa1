"""Which documents of a data set are taken, and what in a row is their text and their domain."""

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from seqarch.data.manifest import check_domain
from seqarch.errors import UserError, refused
from seqarch.runs.files import kind_of_json
from seqarch.tables import check_columns

COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "!=": operator.ne, "=": operator.eq, ">": operator.gt, "<": operator.lt
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """`FIELD OP VALUE` of `--where`: numbers are compared as numbers, all else as text."""

    field: str
    sign: str
    value: str

    @classmethod
    def parse(cls, text: str) -> "Condition":
        found = re.fullmatch(rf"\s*([^=<>]+?)\s*({'|'.join(COMPARE)})(?![=<>])\s*(.*?)\s*", text, re.DOTALL)
        if found is None or (found[2] not in ("=", "!=") and not found[3]):
            raise UserError(f"--where {text} is not a condition such as int_score>=4, with one of {', '.join(COMPARE)}")
        return cls(*found.groups())

    def holds(self, found: Any) -> bool:
        """Whether a value meets the condition; null is unequal to all."""
        if found is None:
            return self.sign == "!="
        found = str(found).lower() if isinstance(found, bool) else found
        compare = COMPARE[self.sign]
        try:
            numbers = float(found), float(self.value)
        except (TypeError, ValueError, OverflowError):
            return compare(str(found), self.value)
        if isinstance(found, str) and not all(map(math.isfinite, numbers)):  # words, such as the language nan
            return compare(found, self.value)
        return compare(*numbers)


class Place(NamedTuple):
    """Where a row is: its file, and its line or row there from 1."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Select:
    """What is read of a row. Fields in objects are named with dots: `meta.redpajama_set_name`."""

    text_field: str
    domain_field: str | None = None
    where: tuple[str, ...] = ()

    @functools.cached_property
    def conditions(self) -> list[Condition]:
        return [Condition.parse(each) for each in self.where]

    @functools.cached_property
    def flags(self) -> dict[str, str]:
        """The flag that names each field."""
        by_condition = {condition.field: "--where" for condition in self.conditions}
        domain = {self.domain_field: "--domain_field"} if self.domain_field else {}
        return {**by_condition, **domain, self.text_field: "--text_field"}

    def columns(self, names: Sequence[str], where: object) -> list[str]:
        """The columns of a table that hold the fields.

        Raises:
            UserError: there is none, or there are several of one name.
        """
        found = []
        for field, flag in self.flags.items():
            name = field if field in names else field.partition(".")[0]
            if name not in names:
                raise UserError(f"{where}: no column '{name}', only {', '.join(names)}: {_advice(flag, names)}")
            check_columns(where, names, [name])
            found.append(name)
        return list(dict.fromkeys(found))

    def pick(self, record: Mapping[str, Any], where: Place) -> tuple[str, str] | None:
        """The domain ("" without `domain_field`) and text of a row; `None` if it does not meet the conditions.

        Raises:
            UserError: a field is missing or not text, or the domain's is not a domain name.
        """
        if not all(condition.holds(self._value(record, condition.field, where)) for condition in self.conditions):
            return None
        domain = ""
        if self.domain_field:
            domain = self._text(record, self.domain_field, where)
            with refused(f"{where}: field '{self.domain_field}'", UserError, why=True):
                check_domain(domain)
        return domain, self._text(record, self.text_field, where)

    def _text(self, record: Mapping[str, Any], field: str, where: Place) -> str:
        text = self._value(record, field, where)
        if not isinstance(text, str):
            raise UserError(f"{where}: field '{field}' holds {kind_of_json(text)}, not text")
        return text

    def _value(self, record: Mapping[str, Any], field: str, where: Place) -> Any:
        if field in record:
            return record[field]
        here: Any = record
        for part in field.split("."):
            if not isinstance(here, Mapping) or part not in here:
                texts = [name for name, value in record.items() if isinstance(value, str)]
                advice = _advice(self.flags[field], texts, where.line)
                raise UserError(f"{where}: has no field '{field}', only {', '.join(record) or 'none'}: {advice}")
            here = here[part]
        return here


def _advice(flag: str, names: Sequence[str], line: int = 1) -> str:
    """What to do about a missing field, where columns or, in this line, fields of these names may be meant."""
    if line > 1:
        return f"leave the row out, or name one with {flag}"
    return f"add {flag} {names[0]}" if flag == "--text_field" and len(names) == 1 else f"name one with {flag}"

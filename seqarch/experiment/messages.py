"""Turns the parser's errors into one line that names the key, or the file and line, and says what would be right.

jsonargparse words its errors for programmers and nests them. What is recognised here is said shortly; anything else,
in whatever words, is cut down to its first sentence.
"""

from __future__ import annotations

import argparse
import collections.abc
import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seqarch.errors import one_line
from seqarch.experiment.recipes import given_recipes, locate, written_under
from seqarch.mixers.base import Mixer
from seqarch.mixers.registry import broken_mixers, mixer_entries
from seqarch.plugins import refusal

GIVEN_BY_THE_MODEL = ("self", "d_model", "layer_idx", "n_layers")
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list, such as [a, b]",
    "tuple": "a list",
    "dict": "a mapping, such as {name: value}",
    "NoneType": "null",
}
MIXERS = "model.mixers"
"""The key whose entries are mixers: of a mapping's entries the parser says neither the name nor what they should be."""
KEY = re.compile(r'Parser key "([^"]+)"')
OPTION = re.compile(r"Option '([^']+)' is not accepted(.*)")
CLASS = re.compile(r"Expected a dot import path string: (.+)")
SUBTYPES = re.compile(r"Subtypes: \[(.+)\]")
EXPECTED = re.compile(r"Expected an? (.+?)\. Got value: (.+?)(?=\. Got value: Namespace|\n|$)")
GIVEN = re.compile(r"^ +Given value: (.+?)(?=\. Got value: Namespace|$)", re.MULTILINE)


def near(name: str, known: Iterable[str]) -> str:
    """ ": did you mean ...?" with the nearest names; or all names where they are few; or nothing."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    alike = [difflib.SequenceMatcher(None, match, name.lower()).ratio() for match in matches]
    if matches:
        nearest = [by_lower[match] for match, ratio in zip(matches, alike, strict=True) if ratio > alike[0] - 0.1]
        return f": did you mean {' or '.join(nearest)}?"
    return f": expected {_one_of(list(by_lower.values()))}" if 0 < len(by_lower) <= 24 else ""


def explain(message: str, options: Mapping[str, str], args: Sequence[str] = ()) -> str:
    """One line for an error of the parser.

    Args:
        message: what the parser says.
        options: the command's keys ("model.d_model") and how each is written on the command line.
        args: the command line, to find the recipe and the line that are meant.
    """
    message = re.sub(r"\b(fit|validate|test)\.(?=\w)", "", message)
    for rule in (_unrecognised, _missing, _choice, _no_value, _unknown_key, _wrong_value):
        if (line := rule(message, options, args)) is not None:
            return one_line(line)
    return _first_sentence(message)


def options_of(parser: Any) -> dict[str, str]:
    """The keys of a parser and of its subcommands, and how each is written on the command line."""
    options: dict[str, str] = {}
    for action in parser._actions:
        for subparser in (action.choices or {}).values() if isinstance(action, argparse._SubParsersAction) else ():
            options.update(options_of(subparser))
        long = [string for string in action.option_strings if string.startswith("--")]
        if not isinstance(action, argparse._SubParsersAction):
            options[action.dest] = long[0] if long else action.dest.upper()
    return options


def option_names(mixer: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The options of a class that a recipe sets, without what the model gives to a mixer."""
    parameters = inspect.signature(mixer).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if name not in GIVEN_BY_THE_MODEL
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def _unrecognised(message: str, options: Mapping[str, str], args: Sequence[str]) -> str | None:
    if not (match := re.match(r"unrecognized arguments: (\S+)", message)):
        return None
    token = match[1].partition("=")[0]
    if token.startswith("-"):
        return f"unknown option {token}{near(token, options.values())}"
    hint = f": a recipe is given with --config {token}" if token.endswith((".yaml", ".yml")) else ""
    return f"unexpected argument '{token}'{hint}"


def _missing(message: str, options: Mapping[str, str], args: Sequence[str]) -> str | None:
    if match := re.match(r"the following arguments are required: (.+)", message):
        keys = [key.rpartition(".")[2] if key not in options else key for key in match[1].split(", ")]
        flags = [options.get(key, key) for key in keys]
        recipe = " (or a recipe that has them: --config FILE)" if "--config" in options.values() else ""
        return f"missing {', '.join(flags)}{recipe}"
    if match := re.match(r'expected "\S+" to be one of \{(.+)\}, but it was not provided', message):
        return f"missing command: expected {_one_of(match[1].split(','))}"
    return None


def _choice(message: str, options: Mapping[str, str], args: Sequence[str]) -> str | None:
    if not (match := re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.+)\)", message)):
        return None
    name = "command" if match[1] in ("command", "subcommand") else f"value of {match[1]}"
    return f"unknown {name} '{match[2]}'{near(match[2], [c.strip(' ' + chr(39)) for c in match[3].split(',')])}"


def _no_value(message: str, options: Mapping[str, str], args: Sequence[str]) -> str | None:
    match = re.match(r"argument (?:-\w/)?(-\S+): expected (one argument|at least one argument)", message)
    return f"{match[1]} needs a value" if match else None


def _unknown_key(message: str, options: Mapping[str, str], args: Sequence[str]) -> str | None:
    if match := re.match(r"Group '([^']+)' does not accept option '([^']+)'", message):
        group, option = match[1], match[2]
    elif match := re.match(r"Option '([^']+)' is not accepted", message):
        group, option = "", match[1].partition(".")[0]
    else:
        return None
    prefix = f"{group}." if group else ""
    known = {key.removeprefix(prefix).partition(".")[0] for key in options if key.startswith(prefix)}
    where = locate(given_recipes(args), group, option.partition(".")[0])
    return f"{where}{f'{group} has no option' if group else 'there is no key'} '{option}'{near(option, known)}"


def _wrong_value(message: str, options: Mapping[str, str], args: Sequence[str]) -> str | None:
    keys = list(dict.fromkeys(KEY.findall(message)))
    if not keys:
        return None
    typed = any(arg.startswith(f"--{keys[0]}") for arg in args)  # the command line has the last word
    files = [] if typed else given_recipes(args)
    if keys[0] == MIXERS and (name := _mixer_meant(message, keys, args)):
        keys[0] = f"{MIXERS}.{name}"
    for rule in (_not_allowed, _unknown_class, _no_module, _unknown_option, _missing_option, _wrong_type):
        if (line := rule(message, keys, files)) is not None:
            return line
    return None


def _mixer_meant(message: str, keys: list[str], args: Sequence[str]) -> str | None:
    """The name in `model.mixers` of the mixer whose entry or option is wrong; `None` if it could be several."""
    option, value = keys[-1], None
    if option_match := OPTION.findall(message):
        option = option_match[-1][0].partition(".")[0]
    elif class_match := CLASS.findall(message):
        option, value = "class_path", class_match[-1].strip()
    elif wrong := _expected_and_given(message):
        value = wrong[1]
    written = written_under(args, MIXERS)
    for name, content in written:
        if value is not None and (str(content) == value or value in map(str, _values(content, option))):
            return name
    having = {name for name, content in written if _values(content, option)}
    return having.pop() if len(having) == 1 else None


def _values(content: Any, option: str) -> list[Any]:
    """All values that the key `option` has in nested mappings and lists."""
    if isinstance(content, dict):
        own = [value for key, value in content.items() if key == option]
        return own + [found for value in content.values() for found in _values(value, option)]
    if isinstance(content, list):
        return [found for item in content for found in _values(item, option)]
    return []


def _not_allowed(message: str, keys: list[str], files: list[Path]) -> str | None:
    if not (match := re.search(r"Importing '([^']+)' is not allowed", message)):
        return None
    return f"{locate(files, keys[0], match[1])}{'.'.join(keys)}: {refusal(match[1])}"


def _unknown_class(message: str, keys: list[str], files: list[Path]) -> str | None:
    matches = list(CLASS.finditer(message))
    if not matches:
        return None
    name = matches[-1][1].strip()
    subtypes = SUBTYPES.findall(message[: matches[-1].start()])
    paths = dict.fromkeys(re.findall(r"[\w.]+\.\w+", subtypes[-1] if subtypes else ""))
    bases = [base for base in map(import_class, paths) if base and base is not collections.abc.Callable]
    if not bases and len(keys) == 1 and keys[0].startswith(MIXERS):
        bases = [Mixer]
    kind = " or ".join(base.__name__ for base in bases) or "class"
    where = f"{locate(files, keys[0], name)}{'.'.join(keys)}"
    if name in (broken := broken_mixers()):
        return f"{where}: {broken[name]}"
    known = {known for base in bases for known in class_names(base)}
    return f"{where}: there is no {kind} '{name}'{near(name, known) or ': give its full path, module.Class'}"


def _unknown_option(message: str, keys: list[str], files: list[Path]) -> str | None:
    matches = list(OPTION.finditer(message))
    if not matches:
        return None
    option, rest = matches[-1][1], matches[-1][2]
    if "init_args=Namespace(class_path=" in rest:
        return (
            f"{locate(files, keys[0], option.partition('.')[0])}{keys[0]}: beside class_path there may be init_args "
            "alone, which holds the options: {class_path: NAME, init_args: {OPTION: VALUE}}"
        )
    before = re.search(r"class_path '([^']+)':\s*$", message[: matches[-1].start()])
    path = before or re.search(r"class_path='([^']+)'", rest)
    name = path[1].rpartition(".")[2] if path else "it"
    target = import_class(path[1]) if path else None
    known = option_names(target) if target else ()
    where = locate(files, keys[0], option.partition(".")[0])
    if target is Mixer:
        return f"{where}{'.'.join(keys)}: class_path is missing: {{class_path: NAME, init_args: {{OPTION: VALUE}}}}"
    return f"{where}{'.'.join(keys)}: {name} has no option '{option}'{near(option, known)}"


def _no_module(message: str, keys: list[str], files: list[Path]) -> str | None:
    match = re.search(r"No module named '[^']+'|module '[^']+' has no attribute '[^']+'", message)
    path = re.findall(r"class_path['\"]?[=:] ?'([^']+)'", message)
    if match is None or not path:
        return None
    return f"{locate(files, keys[0], path[-1])}{'.'.join(keys)}: there is no class {path[-1]}: {match[0]}"


def _missing_option(message: str, keys: list[str], files: list[Path]) -> str | None:
    if not (match := re.search(r"the following arguments are required: (.+?)(?=\. Got value: |$)", message, re.M)):
        return None
    path = re.search(r"class_path[ =]'([^']+)'", message)
    name = path[1].rpartition(".")[2] if path else "it"
    needs = f"needs the option {match[1]}: give it in init_args"
    return f"{locate(files, keys[0], name)}{'.'.join(keys)}: {name} {needs}"


def _wrong_type(message: str, keys: list[str], files: list[Path]) -> str | None:
    if wrong := _expected_and_given(message):
        expected, value = wrong
        where = locate(files, keys[0], keys[-1].rpartition(".")[2], value)
        return f"{where}{'.'.join(keys)} is {_short(value)}: expected {_kinds(expected)}"
    if match := re.search(r"Unable to load config ['\"](.+?)['\"]", message):
        where = locate(files, "", keys[0])
        return f"{where}{keys[0]} is {_short(match[1])}: expected a mapping of its options, or a file that holds one"
    return None


def _expected_and_given(message: str) -> tuple[list[str], str] | None:
    """The types that a value may have, as Python writes them, and the value of another type that was given."""
    if match := re.search(r"Type (\S*Callable\[.+\]) expects .*Got value: (.+)", message):
        return [match[1]], match[2]
    if matches := EXPECTED.findall(message):
        return _split(matches[-1][0]), matches[-1][1].strip()
    subtypes, given = SUBTYPES.findall(message), GIVEN.findall(message)
    return (_split(subtypes[-1]), given[0]) if subtypes and given else None


def _first_sentence(message: str) -> str:
    """What is left to say of an error in unknown words: the key, and the first line with content."""
    key = KEY.search(message)
    lines = [one_line(KEY.sub("", line)).strip(" :-") for line in message.splitlines()]
    lines = [line for line in lines if line and not line.startswith("Does not validate against")]
    sentence = lines[0] if lines else "the command line is wrong; --help shows what is accepted"
    return f"{key[1]}: {sentence}" if key else sentence


def import_class(path: str) -> type | None:
    """The class at a dotted path, `None` if there is none."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None


def class_names(base: type) -> set[str]:
    """Names of the classes that a recipe may give where `base` is expected."""
    if base is Mixer:
        return {entry.name for entry in mixer_entries()}
    names = {name for child in base.__subclasses__() for name in class_names(child)}
    return names or {base.__name__}


def _kinds(subtypes: Iterable[str]) -> str:
    """How a person would call types that are written as Python writes them."""
    choices: list[str] = []
    kinds: list[str] = []
    for subtype in subtypes:
        if match := re.fullmatch(r"typing\.Literal\[(.+)\]", subtype):
            choices += [choice.strip("'\"") for choice in _split(match[1])]
            continue
        match = re.fullmatch(r"<class '(?:.*\.)?(\w+)'>|(\w+)\[.+\]", subtype)
        name = (match[1] or match[2]) if match else subtype
        if class_ := re.search(r"Callable\[.*?([\w.]+)\]$|'([\w.]+)'", subtype):
            name = next(part for part in class_.groups() if part).rpartition(".")[2]
        kinds.append(
            KINDS.get(name, f"a {name}" if " " in name else f"{name}, as NAME or {{class_path: NAME, init_args: ...}}")
        )
    kinds = [kind for kind in dict.fromkeys(kinds) if kind != "null" or len(kinds) + len(choices) == 1]
    return _one_of([*dict.fromkeys(choices), *kinds])


def _split(text: str) -> list[str]:
    """Parts between the commas that stand in no bracket."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[(") - (char in "])")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else "".join(names)


def _short(value: str) -> str:
    return value if len(value) <= 80 else value[:77] + "..."

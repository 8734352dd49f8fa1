"""`seqarch --completion`: a script that completes the names of commands, options, recipes and mixers."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from seqarch.cli.commands import COMMANDS, GROUP, TRAINING
from seqarch.cli.mixer_list import NEW
from seqarch.cli.training import parser_of
from seqarch.experiment.recipes import bundled_recipes
from seqarch.plugins import MIXERS, entries

SCRIPT = """\
# Completes `seqarch` in bash and zsh; written by `seqarch --completion`.
if [ -n "${{ZSH_VERSION-}}" ]; then
    autoload -U +X compinit && compinit
    autoload -U +X bashcompinit && bashcompinit
fi
_seqarch() {{
    [ -z "${{ZSH_VERSION-}}" ] || emulate -L ksh
    local recipes="{recipes}"
    local mixers="{mixers}"
    local word=${{COMP_WORDS[COMP_CWORD]}} command="${{COMP_WORDS[1]}} " options= names=
    [ "$COMP_CWORD" -lt 3 ] || command="$command${{COMP_WORDS[2]}} "
    [ "$COMP_CWORD" -gt 1 ] || command=
    case $command in
{cases}
    esac
    case ${{COMP_WORDS[COMP_CWORD-1]}} in
    -c | --config) names=$recipes ;;
    --mixer | --against) names="$mixers $recipes" ;;
    -*) names= ;;
    esac
    case $word in -*) names=$options ;; esac
    COMPREPLY=($(compgen -W "$names" -- "$word"))
}}
complete -o default -F _seqarch seqarch
"""
"""Where no name fits, the shell completes names of files."""


def completion() -> str:
    """The script, for bash and zsh. It knows the plug-ins that are installed now."""
    places = {"mixers": f"{NEW} $mixers"}
    places |= dict.fromkeys(("recipes copy", "bench mixers", "bench generation"), "$recipes")
    cases = [_case("", "--help --version --completion", " ".join((*TRAINING, *COMMANDS, *entries(GROUP))))]
    cases += [_case(" | ".join(f'"{name} "*' for name in TRAINING), *_names(parser_of("fit"), ""))]
    for name, command in COMMANDS.items():
        for words, parser in _parsers(name, command.parser(f"seqarch {name}")):
            cases.append(_case(f'"{words} "*', *_names(parser, places.get(words, ""))))
    known = {"recipes": " ".join(bundled_recipes()), "mixers": " ".join(entries(MIXERS))}
    return SCRIPT.format(cases="\n".join(cases), **known)


def _case(pattern: str, options: str, names: str) -> str:
    return f"""    {pattern or '""'}) options="{options}" names="{names}" ;;"""


def _parsers(words: str, parser: Any) -> Iterator[tuple[str, Any]]:
    """A command's inner commands, then itself: the first pattern that fits counts."""
    for name, inner in _commands(parser).items():
        yield from _parsers(f"{words} {name}", inner)
    yield words, parser


def _names(parser: Any, known: str) -> tuple[str, str]:
    """The options of a command, and what else it takes: inner commands, `known` names, or nothing but options."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag[:2] == "--"]
    options = " ".join(flag for flag in flags if not flag.endswith("+"))
    takes = all(action.option_strings for action in parser._actions)
    return options, " ".join(_commands(parser)) or known or ("$options" if takes else "")


def _commands(parser: Any) -> Mapping[str, Any]:
    return next((each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)), {})

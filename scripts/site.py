"""Hooks of `make docs`: pages made from the code and from the files of the repository, formulas, no outside requests.

Formulas become MathML, which browsers draw without a script or a font. A build fails when a page would load anything
from another host.
"""

from __future__ import annotations

import html
import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that are files of the repository's root."""
OPTIONS, GALLERY, QUESTIONS, NOTEBOOK = "options.md", "results/gallery.md", "questions.md", "notebook.md"
ASKED, NOTES = ROOT / "docs/questions.csv", ROOT / "docs/notebook.ipynb"
"""The sources of two pages that are made: questions with the pages that answer them, and the notebook."""
LAST = {OPTIONS, "architecture.md", "changelog.md", "extend.md", "results/drafts.md"}
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
ROLE = re.compile(r":\w+:`~?(?:\w+\.)*(\w+)`")
FIGURE = re.compile(r'<img alt="[^"]*" src="([^"]+\.png)"\s*/?>')
UNIT = re.compile(r"(?<=\d) (?=(?:%|x|ms|GiB)(?!\w))")
NAME = re.compile(r"<code>([^\s<]{1,45})</code>")
PART = re.compile(r"(?<=\w[._/])(?=\w)")
"""Where the narrow tables of a phone may break a name."""
TEXT = re.compile(r">[^<]+<")
MODEL = re.compile(r"\b(?:[A-Z]\w*-\d\w*|Transformer\+\+)|(?<![^\s>])--?[a-z][\w.]*")
CSS_URL = re.compile(r"(?:url\(|@import)\s*['\"]?\s*((?:https?:)?//[^'\")\s]+)")
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "link": "href",
}
"""For each element, the attribute that names what a browser loads."""
NOT_LOADED = {"canonical", "prev", "next", "alternate", "license", "author"}
"""Relations of a `link` that no browser follows by itself."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files of `docs`."""
    from mkdocs.structure.files import File

    for name, source in ROOT_PAGES.items():
        files.append(File.generated(config, name, content=root_page(source)))
    sys.path.append(str(ROOT))  # mkdocs runs elsewhere
    from benchmarks.tables import gallery
    from scripts import notebook

    made = {
        OPTIONS: options_page(),
        GALLERY: gallery.page(),
        QUESTIONS: questions_page(),
        NOTEBOOK: notebook.page(NOTES),
    }
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Let a search find pages for developers after those for users."""
    if page.file.src_uri in LAST:
        page.meta["search"] = {"boost": 0.5}
    if page.file.src_uri.startswith("api/"):
        page.meta["search"] = {"boost": 0.2}
    return text


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Draw formulas, and keep names such as RWKV-7, options, and numbers with their unit, on one line."""
    if page is not None:
        content = FIGURE.sub(lambda found: as_svg(found, page.url), content)
    content = content.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    content = UNIT.sub("\N{NO-BREAK SPACE}", content)
    content = NAME.sub(lambda found: f'<code class="name">{PART.sub("<wbr>", found[1])}</code>', content)
    content = FORMULA.sub(lambda found: mathml(html.unescape(found[2]), block=found[1] == "div"), content)
    return TEXT.sub(lambda text: MODEL.sub(r'<span class="name">\g<0></span>', text[0]), content)


def on_post_build(config: Any) -> None:
    """Fail where a page of the site loads something from another host."""
    from mkdocs.exceptions import Abort

    if found := sorted(outside_requests(Path(config["site_dir"]))):
        raise Abort("the site must load nothing from other hosts:\n" + "\n".join(found))


def as_svg(image: re.Match[str], url: str) -> str:
    """The SVG of a figure, which stays sharp, where there is one next to its PNG."""
    figure = (ROOT / "docs" / url / image[1]).resolve().with_suffix(".svg")
    return image[0].replace(".png", ".svg") if figure.is_file() else image[0]


def questions_page() -> str:
    """The questions of newcomers, each with a link to the page that answers it. A search does not find this page."""
    from seqarch.tables import read_csv

    lines = [f"* [{row['question']}]({row['page']})" for row in read_csv(ASKED)]
    return "\n".join(["---\nsearch:\n  exclude: true\n---\n# Questions\n", *lines])


def root_page(source: str) -> str:
    """A file of the repository's root as a page of the site."""
    text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
    for name, other in ROOT_PAGES.items():
        text = text.replace(f"]({other})", f"]({name})")
    return text


def mathml(tex: str, block: bool) -> str:
    """The MathML of a formula. A block scrolls where it is wider than the page."""
    from latex2mathml.converter import convert

    drawn = convert(tex.strip(), display="block" if block else "inline")
    return f'<div class="formula">{drawn}</div>' if block else drawn


class _Loads(HTMLParser):
    """Collects the addresses on other hosts that a browser loads by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "link" and set(given.get("rel", "").split()) & NOT_LOADED:
            return
        addresses = [given.get(LOADED[tag], "")] if tag in LOADED else []
        addresses += given.get("srcset", "").split(",")
        self.addresses += [each for each in map(str.strip, addresses) if re.match(r"(https?:)?//", each)]
        self.addresses += CSS_URL.findall(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "style":
            self.addresses += CSS_URL.findall(data)


def outside_requests(site: Path) -> Iterator[str]:
    """The addresses on other hosts that pages and style sheets below `site` load, each as `FILE: ADDRESS`."""
    for path in site.rglob("*.html"):
        loads = _Loads()
        loads.feed(path.read_text(encoding="utf-8"))
        yield from (f"{path.relative_to(site)}: {address}" for address in loads.addresses)
    for path in site.rglob("*.css"):
        yield from (f"{path.relative_to(site)}: {each}" for each in CSS_URL.findall(path.read_text(encoding="utf-8")))


def options_page() -> str:
    """The page with every option of every command and every mixer, in Markdown."""
    from seqarch.cli import commands, training
    from seqarch.experiment.parser import build_parser

    parsers = {"fit": build_parser(*training.words("fit"))}
    parsers |= {name: command.parser(f"seqarch {name}") for name, command in commands.COMMANDS.items()}
    lines = [
        "# All options",
        "Every option of every command with its default value. This page is made from the parsers of the commands.",
        "`seqarch validate` and `seqarch test` take the options of `seqarch fit`. "
        "[Command line](cli.md) explains what the commands do.",
    ]
    for name, parser in parsers.items():
        lines += command_section(f"seqarch {name}", parser, commands.TRAINING.get(name, parser.description or ""))
    return "\n\n".join([*lines, *mixers_section()])


def command_section(title: str, parser: ArgumentParser, about: str, level: str = "##") -> Iterator[str]:
    """The heading, the description and the tables of a command, then those of its subcommands."""
    yield f"{level} {title}"
    yield _cell(about)
    for group in parser._action_groups:
        rows = [_row(action) for action in group._group_actions if _is_shown(action)]
        if not rows:
            continue
        if (group.title or "") not in ("options", "positional arguments"):
            yield f"{level}# {title}: `{group.title}`"
            yield _cell(group.description or "")
        yield "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, sub in action.choices.items():
                yield from command_section(f"{title} {name}", sub, sub.description or "", level + "#")


def _is_shown(action: Action) -> bool:
    """Whether an action is an option that sets something."""
    hidden = ("_HelpAction", "_ActionHelpClassPath", "_ActionConfigLoad", "ActionSubCommands")
    return action.help is not SUPPRESS and type(action).__name__ not in hidden


def _row(action: Action) -> str:
    names = [name for name in action.option_strings if not name.endswith("+")] or [action.dest]
    unset = action.default in (SUPPRESS, None, "")
    default = "required" if action.required else "" if unset else f"`{_cell(str(action.default))}`"
    return f"| {', '.join(f'`{name}`' for name in names)} | {default} | {_cell(str(action.help or ''))} |"


def _cell(text: str) -> str:
    """A text on one line, without roles of reStructuredText. Cell borders and elements of Markdown are escaped."""
    joined = ROLE.sub(r"`\1`", " ".join(text.split()))
    return re.sub(r"<(?=\w)", "&lt;", joined.replace("|", "\\|"))


def mixers_section() -> Iterator[str]:
    """The options of each mixer that comes with seqarch."""
    from seqarch.cli.mixers import describe_mixers

    yield "## Options of mixers"
    yield "Set them in a recipe under `init_args`, and in the exam as `--mixer.OPTION VALUE`."
    for mixer in describe_mixers():
        if mixer["package"] != "seqarch":
            continue
        yield f"### {mixer['name']}"
        yield _cell(mixer["summary"])
        rows = []
        for name, option in mixer["options"].items():
            default = "required" if option["required"] else f"`{_cell(str(option['default']))}`"
            rows.append(f"| `{name}` | {default} | {_cell(option['meaning'])} |")
        yield "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])

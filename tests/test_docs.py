"""README and docs work as written: they name all recipes, their commands and recipes parse, their links exist."""

from __future__ import annotations

import importlib
import pydoc
import re
import shlex
import sys
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from seqarch import cli
from seqarch.cli.commands import COMMANDS
from seqarch.cli.commands import parse as parse_command
from seqarch.kernels.packages import is_installed
from seqarch.mixers.registry import import_parts
from seqarch.plugins import GROUPS
from seqarch.testing import MixerSuite
from seqarch.training.callbacks import CALLBACKS
from tests.pages import check_command, check_training

ROOT = Path(__file__).parents[1]
ROOT_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES = [*ROOT_PAGES, *sorted((ROOT / "docs").glob("**/*.md"))]
ZOO, RECALL = ROOT / "plugins" / "seqarch-zoo", ROOT / "plugins" / "seqarch-recall"
WITH_COMMANDS = [*PAGES, RECALL / "README.md", ZOO / "README.md", *sorted(ZOO.glob("pages/*.md"))]
GENERATED = {"options.md", "contributing.md", "changelog.md", "notebook.md", "questions.md", "results/gallery.md"}
"""Pages that `scripts/site.py` makes."""
MADE = {ROOT / "docs" / page for page in GENERATED}
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
FILE_NAME = r"^`([\w./]+)`[^\n]*:\n"
"""The line before a block that names the block's file."""
TRAINING = ("fit", "validate", "test")
RECIPE_KEYS = {"extends", "run_dir", "seed_everything", "trainer", "model", "data", "ckpt_path", *CALLBACKS}


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in some languages."""
    return [body for language, body in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def braces(word: str) -> list[str]:
    """A word with its braces expanded as Bash does: `a_{b,c}` is `a_b` and `a_c`."""
    if not (found := re.fullmatch(r"(.*?)\{([^{}]*)\}(.*)", word)):
        return [word]
    return [each for part in found[2].split(",") for each in braces(f"{found[1]}{part}{found[3]}")]


def unrolled(loop: re.Match[str]) -> str:
    """The commands of a shell loop, once for each of its words."""
    words = [each for word in loop[2].split() for each in braces(word)]
    return "\n".join(re.sub(rf"\${loop[1]}\b", word, loop[3]) for word in words)


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The commands of a page's shell blocks and tables, split as a shell does; unknown variables become 1."""
    variables: dict[str, str] = {}
    in_tables = re.findall(r"(?<=\S) \| `((?:for|seqarch) [^`]+)`(?= \|)", page.read_text(encoding="utf-8"))
    for block in (*blocks(page, "bash", "console", "sh"), "\n".join(in_tables)):
        block = re.sub(r"for (\w+) in ([^;]+);\s*do\s+(.*?);?\s*done", unrolled, block, flags=re.DOTALL)
        refused = re.findall(r"^\$ (.*)\nseqarch: error", block, flags=re.MULTILINE)
        for line in block.replace("\\\n", " ").splitlines():
            if assignment := re.fullmatch(r"(?:\$ )?(\w+)=(?:'(.*)'|\"(.*)\"|\((.*)\))", line):
                variables[assignment[1]] = next(filter(None, assignment.groups()[1:]))
            line = re.sub(r"^\s*(\$ )?(\w+=\S* )*(\.venv/bin/)?", "", line)
            if not line.startswith("seqarch "):
                continue
            if line in refused:
                continue
            words: list[str] = []
            for word in shlex.split(line.partition(" > ")[0], comments=True):
                known = variables.get(re.sub(r"\W", "", word)) if word.startswith("$") else None
                words += shlex.split(known) if known else [re.sub(r"\$\w+", "1", word)]
            yield line, words


def label(page: Path, text: str) -> str:
    return f"{page.name}: {' '.join(text.split())[:60]}"


PAGE_OF = {tuple(words): page for page in WITH_COMMANDS for _, words in commands(page)}
"""Each command once, though several pages may show it."""
RECIPES = [pytest.param(p, block, id=label(p, block)) for p in WITH_COMMANDS for block in blocks(p, "yaml")]


def install(name: str, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    """Declares a package in this folder, as `pip install` does."""
    info = Path(f"{name}-1.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in entry_points.items()]
    (info / "entry_points.txt").write_text("".join(lines))


def entry_points(plugin: Path) -> dict[str, dict[str, str]]:
    return tomllib.loads((plugin / "pyproject.toml").read_text())["project"]["entry-points"]


def declared(module: ModuleType) -> dict[str, dict[str, str]]:
    """The entry points that the pyproject.toml of a page gives to the mixers of its module."""
    own = [name for name, it in vars(module).items() if isinstance(it, type) and it.__module__ == module.__name__]
    return {"seqarch.mixers": {name: f"{module.__name__}:{name}" for name in own}}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Makes the folder that a reader has: the recipes, and the files and mixers from the page."""

    def make(page: Path) -> None:
        (tmp_path / "recipes").symlink_to(ROOT / "recipes")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        install("seqarch_recall", entry_points(RECALL))
        if page.is_relative_to(ZOO):
            (tmp_path / "plugins").symlink_to(ZOO.parent)
            monkeypatch.syspath_prepend(str(ZOO))
            install("seqarch_zoo", entry_points(ZOO))
            import_parts()  # as a process does at its start
        text = page.read_text(encoding="utf-8")
        for name, body in re.findall(FILE_NAME + r"\n```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            Path(name).write_text(body)
            importlib.invalidate_caches()
            module = importlib.import_module(Path(name).stem)
            install(module.__name__, declared(module))
        for name, body in re.findall(FILE_NAME + r"\n```yaml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            Path(name).write_text(body)
        for name in re.findall(r"(?:--from )(runs/\S+)|(runs/\S+)/config\.yaml", text):
            folder = Path("".join(name))
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text((ROOT / "recipes" / "quickstart.yaml").read_text())
            (folder / "checkpoints").mkdir(exist_ok=True)
            (folder / "checkpoints/step_00000400.ckpt").touch()

    modules = set(sys.modules)
    yield make
    new = set(sys.modules) - modules
    folders = (str(tmp_path), str(ZOO))
    made = [name for name in new if (getattr(sys.modules[name], "__file__", None) or "").startswith(folders)]
    for module in [sys.modules.pop(name) for name in made]:
        for each in declared(module)["seqarch.mixers"]:  # the parser keeps classes, and may find them by their names
            kind = vars(module)[each]
            kind.__name__ = kind.__qualname__ = f"{each}OfAnotherPage"


@pytest.mark.commands
@pytest.mark.no_cover
@pytest.mark.parametrize("page", sorted({*PAGE_OF.values()}), ids=lambda page: page.name)
def test_every_command_parses(workplace, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace(page)
    for _, command, *args in [words for words, its in PAGE_OF.items() if its == page]:
        if "FlaLayer" in args and not is_installed("fla"):
            continue
        try:
            with monkeypatch.context() as patch:
                check_line(command, args, patch)
        except BaseException as error:
            error.add_note(f"seqarch {command} {shlex.join(args)}")
            raise


def check_line(command: str, args: list[str], patch: pytest.MonkeyPatch) -> None:
    try:
        if command.startswith("-"):
            cli.run([command, *args])
        elif command not in TRAINING:
            check_command(command, parse_command(command, args), patch)
        else:
            check_training(command, args)
    except SystemExit as stop:  # --help and --print_config end so
        if stop.code:
            raise


@pytest.mark.parametrize(("page", "block"), RECIPES)
def test_every_recipe_in_a_page_parses(workplace, page: Path, block: str) -> None:
    content = yaml.safe_load(block)
    if not isinstance(content, dict) or not set(content) <= RECIPE_KEYS | {"mixers"}:
        pytest.skip("no recipe")
    if "FlaLayer" in block:
        pytest.importorskip("fla")
    workplace(page)
    if "mixers" in content:
        content = {"model": content}
    base = str(content.pop("extends", "quickstart.yaml"))
    found = [path for path in (ROOT / base, ROOT / "recipes" / base, ROOT / f"recipes/{base}.yaml") if path.is_file()]
    assert found, f"extends {base}, which is no file"
    Path("block.yaml").write_text(yaml.safe_dump({"extends": str(found[0]), **content}, sort_keys=False))
    check_training("fit", ["--config", "block.yaml", "--run_dir", "runs/block"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for command in re.findall(r"`seqarch ([a-z]+)", text):
        assert command in (*TRAINING, *COMMANDS, "recall"), f"seqarch {command}"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    made = re.findall(r"(?:`|^)make (\w+)", text, flags=re.MULTILINE)
    assert set(made) <= set(targets)


def test_the_page_on_security_names_the_commands_that_take_allow_code(capsys: pytest.CaptureFixture[str]) -> None:
    page = " ".join((ROOT / "docs/security.md").read_text(encoding="utf-8").split())
    said = re.search(r"repeat the flag: ```.*?``` (.*?) take it\.", page)
    assert said
    words = [
        *([each] for each in (*TRAINING, *COMMANDS)),
        *(["bench", each] for each in ("mixers", "generation", "kernels")),
    ]
    taken = set()
    for command in words:
        with pytest.raises(SystemExit):
            cli.run([*command, "--help"])
        if "--allow_code" in capsys.readouterr().out:
            taken.add(" ".join(command))
    assert set(re.findall(r"`([^`]*)`", said[1])) == taken


def test_the_page_on_recipes_names_every_callback() -> None:
    text = " ".join((ROOT / "docs/recipes.md").read_text(encoding="utf-8").split())
    *others, last = (f"`{section}`" for section in CALLBACKS)
    assert f"{', '.join(others)}, {last}" in text or f"{', '.join(others)} and {last}" in text


def test_every_recipe_is_named() -> None:
    folder = ROOT / "recipes"
    there = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")}
    text = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("recipes.md", "reproduce_figure.md"))
    rows = "\n".join(re.findall(r"^\|.*", text, flags=re.MULTILINE))
    named = {name for word in re.findall(r"`([\w./{},]+)`", rows) for name in braces(word)}
    assert there - named == set()
    assert [name for name in named - there if "/" in name or name.endswith(("_110m", "_1b", "_100k"))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_that_a_page_names_exist(page: Path) -> None:
    names = re.findall(r"(?<![\w/])recipes/[\w./*-]+\.yaml", page.read_text(encoding="utf-8"))
    missing = [name for name in names if not list(ROOT.glob(name))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if file in MADE:
            continue
        assert file.exists(), target
        if page.is_relative_to(ROOT / "docs"):  # the site's build refuses others
            assert file.is_relative_to(ROOT / "docs"), f"{target} is no page of the site: name it as code"
        assert not anchor or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    plain = (unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode() for heading in headings)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


ANY = {"op.py", "reference.py", "triton.py", "kernels/NAME.py", "branches/", *GROUPS}
"""What the pages on the code name of no certain place: files of every op and run, and groups of entry points."""


@pytest.mark.parametrize("page", ["architecture.md", "extend.md"])
def test_files_and_names_of_the_pages_on_the_code_exist(page: str) -> None:
    words = {*re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8"))} - ANY
    files = {word for word in words if re.fullmatch(r"[\w./]+\.(py|md|toml)|[\w/]+/", word)}
    assert [file for file in files if not any((root / file).exists() for root in (ROOT, ROOT / "seqarch"))] == []
    dotted = {word for word in words - files if re.fullmatch(r"seqarch(\.\w+)+", word)}
    assert [word for word in dotted if pydoc.locate(word) is None] == []
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "seqarch").rglob("*.py"))
    ours = {word for word in words if re.fullmatch(r"[A-Z][A-Za-z]\w+", word)}
    assert [word for word in ours if not re.search(rf"^(class )?{word}\b", code, flags=re.MULTILINE)] == []
    assert len(files) > 5
    assert len(ours) > 2


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    listed = re.findall(r"^ +- [^:]+: ([\w./]+\.md)$", nav, flags=re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in PAGES if path not in ROOT_PAGES}
    assert sorted(listed) == sorted(pages | GENERATED)


def test_the_mixer_in_the_readme_keeps_the_contract(workplace) -> None:
    workplace(ROOT / "README.md")
    suite = type("Suite", (MixerSuite,), {"mixer": importlib.import_module("causal_mean").CausalMean})()
    for name in (
        "causality",
        "train_and_eval_agree",
        "bfloat16",
        "flops",
        "refusals",
        "every_parameter_has_a_gradient",
    ):
        getattr(suite, f"test_{name}")({})


WIDENED = "at_least_float32(self.gate(x)), at_least_float32(self.value(x))"
MISTAKES = {
    "none": ("", "", {}),
    "sums in the dtype of the input": (WIDENED, "self.gate(x), self.value(x)", {"bfloat16"}),
    "float()": (WIDENED, "self.gate(x).float(), self.value(x).float()", {"pieces_without_gradients"}),
    "a view": (".clone()", "", {"state_bytes"}),
}


@pytest.mark.parametrize(("right", "wrong", "failing"), MISTAKES.values(), ids=MISTAKES)
def test_the_log_space_mixer_and_its_mistakes(monkeypatch, right: str, wrong: str, failing: set) -> None:
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    code = (ROOT / "tests/min_gru.py").read_text()
    assert right in code
    module = ModuleType("min_gru")
    monkeypatch.setitem(sys.modules, "min_gru", module)  # its dataclass looks there
    exec(code.replace(right, wrong), vars(module))
    suite = type("Suite", (MixerSuite,), {"mixer": module.MinGRU})()
    for name in ("bfloat16", "pieces_without_gradients", "packed_documents", "state_bytes"):
        if name not in failing:
            getattr(suite, f"test_{name}")({})
            continue
        with pytest.raises(AssertionError, match=r"off by|the state takes") as error:
            getattr(suite, f"test_{name}")({})
        last = str(error.value).splitlines()[-1]  # without numbers: these depend on the machine
        assert name == "state_bytes" or re.sub(r"\d+", "0", last) in re.sub(r"\d+", "0", page)


def test_the_command_for_the_tests_on_a_gpu_has_all_of_them() -> None:
    page = (ROOT / "docs/kernels.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"^(pytest -m \"gpu .*)$", page, flags=re.MULTILINE)
    paths = [ROOT / word for word in shlex.split(command) if word.startswith("tests/")]
    assert all(path.exists() for path in paths)
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"pytest\.mark\.gpu", path.read_text())]
    assert len(marked) > 20
    assert [path for path in marked if not any(path.is_relative_to(each) for each in paths)] == []

"""The embedded corpus: real text that every installation of seqarch has, so that the first run needs no download.

It is read from the Python installation itself, by parsing files and never by importing them. `DOMAINS` says what each
domain is made of; docs/data.md has the figures.
"""

import ast
import gettext
import gzip
import hashlib
import html
import importlib.util
import json
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from seqarch.data.prepare import prepare
from seqarch.data.remote import is_remote, mirror
from seqarch.data.shards import is_domain
from seqarch.data.verified import cache_folder
from seqarch.data.workers import worker_pool
from seqarch.errors import absent, refused
from seqarch.versions import version

Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings_of(path: Path) -> list[str]:
    """The docstrings of a file in their order; of `pydoc_data/topics.py` the topics. Empty if it cannot be parsed."""
    tree = _parse(path)
    if tree is None:
        return []
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return [text for text in strings if isinstance(text, str) and "\n" in text]
    owners = [node for node in ast.walk(tree) if isinstance(node, Documented)]
    owners.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in owners if (text := ast.get_docstring(node))]


def code_of(path: Path) -> str:
    """The code of a file without comments and docstrings, evenly laid out. Empty if it cannot be parsed."""
    tree = _parse(path)
    if tree is None:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
    return ast.unparse(tree)


def _parse(path: Path) -> ast.Module | None:
    with warnings.catch_warnings():
        # Old string escapes in other people's files are not this user's concern.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError):
            return None


EMBEDDED = "embedded"
"""The word that means the corpus instead of a folder of domains."""
REVISION = 1
"""Raised whenever the same installation gives another corpus."""

_MODULES = (
    "torch lightning torchmetrics litdata tensorboard numpy matplotlib networkx mpmath jsonargparse rich pyarrow "
    "mistral_common pydantic PIL fsspec jinja2 werkzeug requests pyparsing"
)
_RENAMED = {"mistral_common": "mistral-common", "PIL": "pillow"}
DOCUMENTED = {module: _RENAMED.get(module, module) for module in _MODULES.split()}
"""Packages whose docstrings are training text: module and distribution."""

OTHER_SOURCES = ("botocore", "pycountry")

_SKIPPED_FOLDERS = {"test", "tests", "testing", "idle_test", "_vendor", "site-packages", "__pycache__", "lib2to3"}
_SHORTEST_DOCSTRING = 40
_SHORTEST_PARAGRAPH = 80
_LARGEST_CODE = 200_000  # larger files are generated tables
_LARGEST_SERVICE = 48_000  # the largest services would otherwise fill the domain

_HELP_TOPICS = "python/pydoc_data/topics.py"


@dataclass(frozen=True)
class EmbeddedDomain:
    """A recipe for one domain: `collect` takes a parallel `map` and yields (file, text).

    At most `max_bytes` of texts are taken, in order of a hash.
    """

    collect: Callable[[Callable[..., Iterator]], Iterator[tuple[str, str]]]
    max_bytes: int
    holdout: float


def find_root(root: str | Path) -> Path:
    """The folder that `root` means: itself, the embedded corpus for "embedded", or the mirror of a URL.

    Raises:
        UserError: there is no such folder and the word is nearly "embedded", or the URL is not one of object storage.
    """
    if is_remote(root):
        return mirror(str(root))
    if str(root) == EMBEDDED:
        return build_embedded(cache_folder())
    if not Path(root).exists() and get_close_matches(str(root), [EMBEDDED]):
        raise absent("folder", root, f"did you mean {EMBEDDED}, the built-in corpus?")
    return Path(root)


def build_embedded(cache: Path) -> Path:
    """The folder of the embedded corpus under `cache`, built if this installation's is not there yet (about 30 s).

    Raises:
        UserError: the cache folder cannot be written.
    """
    root = Path(cache, f"embedded-{_installation_key()}")
    if _is_complete(root):
        return root
    import filelock

    with refused(f"cannot write the folder {cache}: set SEQARCH_CACHE to another", OSError):
        root.mkdir(parents=True, exist_ok=True)
    # Several processes of one run may come here at once: one builds, the others wait.
    with filelock.FileLock(root / "lock"):
        if not _is_complete(root):
            _build(root)
    return root


def _is_complete(root: Path) -> bool:
    return all(is_domain(root / name) for name in DOMAINS)


def _installation_key() -> str:
    """Changes with the Python version, the version of any package that is read, and `REVISION`."""
    versions = [f"corpus {REVISION}", f"python {platform.python_version()}"]
    versions += [f"{name} {version(name) or 'absent'}" for name in (*DOCUMENTED.values(), *OTHER_SOURCES)]
    return hashlib.sha256("\n".join(versions).encode()).hexdigest()[:12]


def _build(root: Path) -> None:
    from rich.console import Console
    from rich.progress import track

    texts = root / "texts"
    texts.mkdir(exist_ok=True)
    console = Console(stderr=True)
    console.print(f"Building the embedded corpus in {root} (once)")
    with worker_pool() as pool:

        def parallel(function: Callable, items: list[Path]) -> Iterator:
            results = pool.map(function, items, chunksize=16)
            return iter(track(results, function.__name__, total=len(items), console=console))

        for name, domain in DOMAINS.items():
            file = texts / f"{name}.jsonl"
            with file.open("w", encoding="utf-8") as stream:
                for source, text in _take(domain.collect(parallel), domain.max_bytes):
                    stream.write(json.dumps({"text": text, "file": source}, ensure_ascii=False) + "\n")
            prepare([file], root, name, "byte", holdout=domain.holdout, workers=1)


def _take(found: Iterable[tuple[str, str]], max_bytes: int) -> Iterator[tuple[str, str]]:
    """Whole files in an order of their own, until `max_bytes`."""
    size = 0
    for file, text in sorted(found, key=lambda pair: hashlib.sha256(pair[0].encode()).digest()):
        size += len(text.encode())
        if size > max_bytes:
            return
        yield file, text


def _package_folder(module: str) -> Path | None:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(module)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _in_package(module: str, pattern: str) -> list[tuple[str, Path]]:
    """The files and folders of a package that match, sorted, each after its label; none without the package."""
    folder = _package_folder(module)
    return [(f"{module}/{path.relative_to(folder)}", path) for path in sorted(folder.glob(pattern))] if folder else []


def _python_files(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*.py") if path.is_file())
    return sorted(path for path in files if not _SKIPPED_FOLDERS & set(path.relative_to(folder).parts))


def _standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def collect_docs(parallel: Callable[..., Iterator]) -> Iterator[tuple[str, str]]:
    """Docstrings of the standard library and of the documented packages, and the topics of `help()`."""
    packages = {module: folder for module in DOCUMENTED if (folder := _package_folder(module))}
    folders = {"python": _standard_library(), **packages}
    files = {
        path: f"{name}/{path.relative_to(folder)}" for name, folder in folders.items() for path in _python_files(folder)
    }
    seen: set[str] = set()
    for label, docstrings in zip(files.values(), parallel(docstrings_of, list(files)), strict=True):
        fresh = [text for text in dict.fromkeys(docstrings) if len(text) >= _SHORTEST_DOCSTRING and text not in seen]
        seen.update(fresh)
        if label == _HELP_TOPICS:
            yield from ((f"{label} {number}", text) for number, text in enumerate(fresh))
        elif fresh:
            yield label, "\n\n".join(fresh)


def collect_python(parallel: Callable[..., Iterator]) -> Iterator[tuple[str, str]]:
    """The standard library's code without docstrings and comments."""
    folder = _standard_library()
    files = [path for path in _python_files(folder) if "pydoc_data" not in path.parts and "encodings" not in path.parts]
    for path, code in zip(files, parallel(code_of, files), strict=True):
        if 0 < len(code) < _LARGEST_CODE:
            yield f"python/{path.relative_to(folder)}", code


_CPP_NOISE = re.compile(r'("(?:\\.|[^"\\\n])*")|/\*.*?\*/|//[^\n]*', re.DOTALL)


def collect_cpp(parallel: Callable[..., Iterator]) -> Iterator[tuple[str, str]]:
    """PyTorch's C++ headers without comments and without generated files."""
    for label, path in _in_package("torch", "include/**/*.h"):
        source = path.read_text(encoding="utf-8", errors="ignore")
        if "/ATen/ops/" in label or "@generated" in source:
            continue
        code = _CPP_NOISE.sub(lambda match: match.group(1) or "", source)
        code = re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]+\n", "\n", code)).strip()
        if 0 < len(code) < _LARGEST_CODE:
            yield label, code


def collect_cloud(parallel: Callable[..., Iterator]) -> Iterator[tuple[str, str]]:
    """Prose that describes some 400 web services, from botocore's service models: English, but not about Python."""
    latest = {path.parts[-3]: path for _, path in _in_package("botocore", "data/*/*/service-2.json*")}
    seen: set[str] = set()
    for service, path in latest.items():
        raw = path.read_bytes()
        model = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        plain = (html.unescape(re.sub(r"<[^>]*>", " ", markup)) for markup in _documentation(model))
        paragraphs = [re.sub(r"\s+", " ", text).strip() for text in plain]
        fresh = [text for text in dict.fromkeys(paragraphs) if len(text) >= _SHORTEST_PARAGRAPH and text not in seen]
        seen.update(fresh)
        if fresh:
            yield f"botocore/{service}", "\n\n".join(fresh)[:_LARGEST_SERVICE]


def _documentation(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "documentation" and isinstance(value, str):
                yield value
            else:
                yield from _documentation(value)
    elif isinstance(node, list):
        for value in node:
            yield from _documentation(value)


def collect_names(parallel: Callable[..., Iterator]) -> Iterator[tuple[str, str]]:
    """Names of countries, regions, languages, scripts and currencies in the languages that use Latin letters."""
    for _, language in _in_package("pycountry", "locales/*"):
        lines: dict[str, None] = {}
        for path in sorted(language.glob("LC_MESSAGES/*.mo")):
            with path.open("rb") as stream:
                catalogue = gettext.GNUTranslations(stream)._catalog  # type: ignore[attr-defined]
            names = sorted((key, name) for key, name in catalogue.items() if isinstance(key, str) and key)
            lines.update(dict.fromkeys(name for key, name in names if name != key))
        text = "\n".join(lines)
        if text and sum(character.isascii() for character in text) > 0.8 * len(text):
            yield f"pycountry/{language.name}", text


DOMAINS = {
    "docs": EmbeddedDomain(collect_docs, max_bytes=18_000_000, holdout=0.05),
    "cloud": EmbeddedDomain(collect_cloud, max_bytes=4_000_000, holdout=0.25),
    "python": EmbeddedDomain(collect_python, max_bytes=4_000_000, holdout=0.25),
    "cpp": EmbeddedDomain(collect_cpp, max_bytes=4_000_000, holdout=0.25),
    "names": EmbeddedDomain(collect_names, max_bytes=4_000_000, holdout=0.25),
}
"""The training domain, then the others, from near to far."""

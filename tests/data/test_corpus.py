import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from seqarch.data import corpus
from seqarch.data.corpus import DOMAINS, EmbeddedDomain, build_embedded, code_of, docstrings_of, find_root
from seqarch.data.datamodule import TextDataModule
from seqarch.data.shards import open_domain
from seqarch.data.verified import cache_folder

MODULE = '''"""Of the module."""
import os  # a comment


class Shape:
    """Of the class.

    More of it.
    """

    def area(self):
        """Of the method."""

    def edge(self):
        "Of the edge."
        return "# no comment"


def broken(x):
    return x  # last
'''


def serial(function: Callable, items: list) -> map:
    return map(function, items)


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Python installation: a standard library, torch with headers, botocore with one service."""
    root = tmp_path / "installation"
    for package in ("python", "torch"):
        for i in range(12):
            path = root / package / "sub" / f"m{i}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            own = f'"""The module {package} {i} says something of its own, at length."""\n'
            shared = 'def f():\n    """The same docstring stands in every module of the library."""\n    return 1\n'
            path.write_text(own + shared)
    (root / "python" / "test").mkdir()
    (root / "python" / "test" / "test_m.py").write_text('"""Tests are no documentation, so this is left out."""\n')
    (root / "torch" / "include" / "ATen" / "ops").mkdir(parents=True)
    for i in range(12):
        header = f'#pragma once\n/* a\n comment */\nint f{i}(); // more\nconst char* url = "http://x";\n'
        (root / "torch" / "include" / f"h{i}.h").write_text(header)
    (root / "torch" / "include" / "ATen" / "ops" / "add.h").write_text("int generated();\n")
    for name, documentation in {"boats": "a boat", "birds": "a bird"}.items():
        text = f"<p>Returns <b>{documentation}</b> that is far away &amp; moving. " + "It moves on. " * 6 + "</p>"
        for version in ("2010-01-01", "2020-01-01"):
            path = root / "botocore" / "data" / name / version / "service-2.json.gz"
            path.parent.mkdir(parents=True)
            model = {"shapes": {"One": {"documentation": f"{text} {version}"}, "Two": {"documentation": "short"}}}
            path.write_bytes(gzip.compress(json.dumps(model).encode()))
    monkeypatch.setattr(corpus, "_standard_library", lambda: root / "python")
    monkeypatch.setattr(corpus, "_package_folder", lambda name: root / name if (root / name).is_dir() else None)
    return root


@pytest.fixture
def small_domains(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del installation
    domains = {
        "docs": EmbeddedDomain(corpus.collect_docs, 10**6, holdout=0.4),
        "cpp": EmbeddedDomain(corpus.collect_cpp, 10**6, holdout=0.4),
    }
    monkeypatch.setattr(corpus, "DOMAINS", domains)


def test_docstrings_in_order(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODULE)
    assert docstrings_of(tmp_path / "m.py") == [
        "Of the module.",
        "Of the class.\n\nMore of it.",
        "Of the method.",
        "Of the edge.",
    ]


def test_code_without_docstrings_and_comments(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODULE)
    assert " ".join(code_of(tmp_path / "m.py").split()) == (
        "import os class Shape: def area(self): pass def edge(self): return '# no comment' def broken(x): return x"
    )


@pytest.mark.parametrize("content", [b"def f(:\n", b"\x00", b"# coding: nonsense\n", b"print 'old'\n"])
def test_a_file_that_does_not_parse_gives_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.py").write_bytes(content)
    assert docstrings_of(tmp_path / "m.py") == []
    assert code_of(tmp_path / "m.py") == ""


@pytest.mark.usefixtures("installation")
def test_docs_have_each_docstring_once() -> None:
    docs = dict(corpus.collect_docs(serial))
    assert set(docs) == {f"{package}/sub/m{i}.py" for package in ("python", "torch") for i in range(12)}
    joined = "\n".join(docs.values())
    assert joined.count("The same docstring") == 1
    assert "The module torch 7 says" in docs["torch/sub/m7.py"]


@pytest.mark.usefixtures("installation")
def test_python_has_code_alone() -> None:
    code = dict(corpus.collect_python(serial))
    assert set(code) == {f"python/sub/m{i}.py" for i in range(12)}
    assert set(code.values()) == {"def f():\n    return 1"}


@pytest.mark.usefixtures("installation")
def test_cpp_has_no_comments_and_no_generated_headers() -> None:
    code = dict(corpus.collect_cpp(serial))
    assert set(code) == {f"torch/include/h{i}.h" for i in range(12)}
    assert code["torch/include/h3.h"] == '#pragma once\n\nint f3();\nconst char* url = "http://x";'


@pytest.mark.usefixtures("installation")
def test_cloud_has_the_prose_of_the_latest_models() -> None:
    prose = dict(corpus.collect_cloud(serial))
    assert set(prose) == {"botocore/boats", "botocore/birds"}
    assert prose["botocore/boats"].startswith("Returns a boat that is far away & moving. It moves on.")
    assert prose["botocore/boats"].endswith("2020-01-01")


def test_names_are_there_in_many_languages() -> None:
    pytest.importorskip("pycountry")
    names = dict(corpus.collect_names(serial))
    assert len(names) > 30
    assert "Deutschland" in names["pycountry/de"].split("\n")
    assert "pycountry/ru" not in names


def test_a_domain_is_capped_in_an_order_of_its_own() -> None:
    found = [(f"file {i}", "x" * 10) for i in range(100)]
    taken = list(corpus._take(found, 205))
    assert len(taken) == 20
    assert taken == list(corpus._take(found[::-1], 205))
    assert sorted(taken) != found[:20]


@pytest.mark.usefixtures("small_domains")
def test_build_is_deterministic_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = [build_embedded(tmp_path / name) for name in ("a", "b")]
    for name in ("docs", "cpp"):
        manifests = [(root / name / "manifest.json").read_text() for root in roots]
        assert manifests[0] == manifests[1]
    monkeypatch.setattr(corpus, "_build", None)
    assert build_embedded(tmp_path / "a") == roots[0]


@pytest.mark.usefixtures("small_domains")
def test_a_file_is_on_one_side(tmp_path: Path) -> None:
    root = build_embedded(tmp_path / "cache")
    lines = (root / "texts" / "docs.jsonl").read_text().splitlines()
    files = [json.loads(line)["file"] for line in lines]
    assert len(files) == len(set(files)) == 24
    manifest = open_domain(root, "docs").manifest
    assert manifest.splits["train"].documents + manifest.splits["holdout"].documents == len(files)
    assert manifest.splits["holdout"].documents > 3


@pytest.mark.usefixtures("small_domains")
def test_a_datamodule_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "cache"))
    data = TextDataModule("embedded", {"docs": 1.0}, ["cpp"], sequence_length=16, sequences_per_step=4)
    data.prepare_data()
    assert cache_folder() == tmp_path / "cache"
    assert find_root("embedded").parent == tmp_path / "cache"
    assert next(iter(data.train_dataloader()))["tokens"].shape == (4, 17)


def test_another_installation_is_another_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {corpus._installation_key()}
    monkeypatch.setattr(corpus, "version", lambda name: "0")
    keys.add(corpus._installation_key())
    monkeypatch.setattr(corpus, "REVISION", -1)
    keys.add(corpus._installation_key())
    assert len(keys) == 3


def test_the_domains() -> None:
    assert list(DOMAINS) == ["docs", "cloud", "python", "cpp", "names"]

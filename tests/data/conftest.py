import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from seqarch.data.prepare import prepare

WORDS = ["chunk", "query", "key", "value", "mixer", "shell", "loss", "domain", "token", "naïve", "état"]


def make_texts(n: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) + f" {seed}-{i}" for i in range(n)]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes texts as JSONL into the test's folder."""

    def write(texts: list[str], name: str = "texts.jsonl", field: str = "text") -> Path:
        return write_jsonl(tmp_path / name, texts, field)

    return write


def make_domains(folder: Path) -> Path:
    """Prepare three small domains of bytes: web, code, far."""
    for seed, (domain, n) in enumerate({"web": 90, "code": 60, "far": 40}.items()):
        file = write_jsonl(folder / f"{domain}.jsonl", make_texts(n, seed))
        prepare([file], folder / "root", domain, "byte", holdout=0.2, workers=1)
    return folder / "root"


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small domains of bytes, each in one file of tokens."""
    return make_domains(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("prepare", "sources", "tokenize"):
        monkeypatch.setattr(f"seqarch.data.{place}.PIECE_BYTES", 2000)

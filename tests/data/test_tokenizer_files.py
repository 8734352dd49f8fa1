"""Tokenizers from files: the ids are those of their libraries, and a copy serves wherever the file is gone."""

import ast
import base64
import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from seqarch.data.codecs import TIKTOKEN
from seqarch.data.prepare import prepare
from seqarch.data.shards import Domain
from seqarch.data.tokenizer_files import find_tokenizer, stored_tokenizer, write_tokenizer
from seqarch.data.tokenizers import load_tokenizer
from seqarch.errors import UserError
from tests.data.conftest import make_texts
from tests.data.test_prepare import tokens_of

pytest.importorskip("tokenizers")
tiktoken = pytest.importorskip("tiktoken")
import mistral_common  # noqa: E402
from mistral_common.tokens.tokenizers.tekken import Tekkenizer  # noqa: E402
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

ENTRIES = 3000
"""The entries of published tables that the tests keep: their libraries take seconds to read more than 100,000."""
CORPUS = [*make_texts(60, 0), "def f(x):\n    return x[-1]", "It's 東京, naïve état; I'll go\u00a0there in 2026!"]
TEXTS = [
    "",
    " ",
    "a key and a query",
    "It's naïve état, e\u0301tat, 東京\n\n\tindented  twice\r\n ",
    "\N{FAMILY}\N{ZERO WIDTH JOINER}\N{MUSICAL SYMBOL G CLEF} \u0627\u0644 \ufffd\x00\x07",
    "seqarch!seqarch! and seq arch!",
    "\ufeffLeading mark, trailing space ",
]
WORLD_END = "<|rwkv_tokenizer_end_of_text|>"
HUGE = " ".join(CORPUS) * 40


def trained(kind: str) -> Tokenizer:
    """A small tokenizer of the library's, with a normaliser, an added token and special tokens."""
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("``", '"')])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]", "[CLS]", "[SEP]"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("seqarch!", normalized=False)])
    if kind == "wordpiece":
        around = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=around)
    tokenizer.enable_truncation(8)  # as saved by those who train on sentences
    return tokenizer


@functools.cache
def published_tekken() -> dict[str, Any]:
    """Mistral's file with its first entries."""
    path = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    content = json.loads(path.read_text())
    size = ENTRIES + content["config"]["default_num_special_tokens"]
    return {**content, "vocab": content["vocab"][:ENTRIES], "config": {**content["config"], "default_vocab_size": size}}


def tekken_file(folder: Path) -> Path:
    path = folder / "tekken.json"
    path.write_text(json.dumps(published_tekken()))
    return path


def tiktoken_file(folder: Path, name: str = "small") -> Path:
    """As few entries. Whoever reads it must say in `TIKTOKEN` how so many split text."""
    lines = [f"{each['token_bytes']} {each['rank']}\n" for each in published_tekken()["vocab"]]
    path = folder / f"{name}.tiktoken"
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    paths = {kind: folder / f"{kind}.json" for kind in ("bpe", "unigram", "wordpiece")}
    for kind, path in paths.items():
        trained(kind).save(str(path))
    prefix = str(folder / "sentencepiece")
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=prefix, vocab_size=420, byte_fallback=True, model_type="bpe",
        user_defined_symbols=["seqarch!"], minloglevel=2,
    )  # fmt: skip
    paths |= {"sentencepiece": folder / "sentencepiece.model", "tiktoken": tiktoken_file(folder, "cl100k_base")}
    with mock.patch.dict(TIKTOKEN, {ENTRIES: TIKTOKEN[100_256]}):
        yield {**paths, "tekken": tekken_file(folder), "rwkv_world": world_file(folder)}


def world_file(folder: Path) -> Path:
    """A vocabulary as RWKV's: all bytes, pieces of texts, and parts of letters of several bytes."""
    content = "".join(CORPUS).encode()
    pieces = {content[start : start + size] for size in (2, 3, 5, 9) for start in range(0, 3000, 7)}
    entries = [*(bytes([byte]) for byte in range(256)), *sorted(pieces), "東".encode()[:2], b"'\"\\\r\n"]
    lines = [f"{index} {literal(entry)} {len(entry)}\n" for index, entry in enumerate(entries, 1)]
    (folder / "rwkv_vocab_test.txt").write_text("".join(lines))
    return folder / "rwkv_vocab_test.txt"


def literal(entry: bytes) -> str:
    try:
        return repr(entry.decode())
    except UnicodeDecodeError:
        return repr(entry)


def ranks(path: Path) -> dict[bytes, int]:
    return {base64.b64decode(token): int(rank) for token, rank in map(str.split, path.read_text().splitlines())}


def of_library(kind: str, path: Path) -> Callable[[str], list[int]]:
    """`encode` of the library itself."""
    if kind == "sentencepiece":
        return SentencePieceProcessor(model_file=str(path)).encode
    if kind == "tekken":
        tekken = Tekkenizer.from_file(path)
        return lambda text: tekken.encode(text, bos=False, eos=False)
    if kind == "tiktoken":
        from tiktoken_ext import openai_public

        with mock.patch.object(openai_public, "load_tiktoken_bpe", return_value=ranks(path)):
            return tiktoken.Encoding(**openai_public.cl100k_base()).encode_ordinary
    if kind == "rwkv_world":
        lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
        entries = [ast.literal_eval(rest.rpartition(" ")[0]) for _, rest in lines]
        ids = {entry if isinstance(entry, bytes) else entry.encode(): i for i, entry in enumerate(entries, 1)}
        longest_first = re.compile(b"|".join(map(re.escape, sorted(ids, key=len, reverse=True))))
        return lambda text: [ids[entry] for entry in longest_first.findall(text.encode())]
    library = Tokenizer.from_file(str(path))
    library.no_truncation()
    return lambda text: library.encode(text, add_special_tokens=False).ids


KINDS = ("bpe", "unigram", "wordpiece", "sentencepiece", "tiktoken", "tekken", "rwkv_world")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library(files: dict[str, Path], kind: str) -> None:
    ends = {"bpe": "<|endoftext|>", "unigram": "</s>"}
    ours, theirs = find_tokenizer(str(files[kind]), ends.get(kind)), of_library(kind, files[kind])
    texts = [*TEXTS, HUGE]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids.tolist() == theirs(text)
        assert ids.dtype == ("int32" if kind == "tiktoken" else "uint16")
        assert max(ids, default=0) < ours.vocab_size
    words = "chunk query key"
    assert ours.decode([*ours.encode(words), ours.eos_id]) == words


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unigram"])  # whose words may be any entry
def test_a_text_holds_no_token_that_ends_a_document(files: dict[str, Path], kind: str) -> None:
    ends = {"bpe": "<|endoftext|>", "wordpiece": "[SEP]", "tiktoken": "<|endoftext|>", "rwkv_world": WORLD_END}
    end = ends.get(kind, "</s>")
    tokenizer = find_tokenizer(str(files[kind]), end)
    assert tokenizer.eos_id not in tokenizer.encode(f"chunk {end} query{end}")


def test_known_layouts_of_tiktoken_are_those_of_the_package() -> None:
    from tiktoken_ext import openai_public

    with mock.patch.multiple(
        openai_public, load_tiktoken_bpe=mock.DEFAULT, data_gym_to_mergeable_bpe_ranks=mock.DEFAULT
    ):
        for name, entries in {"gpt2": 50_256, "cl100k_base": 100_256, "o200k_base": 199_998}.items():
            theirs = openai_public.ENCODING_CONSTRUCTORS[name]()
            pattern, special, size = TIKTOKEN[entries]
            assert pattern == theirs["pat_str"]
            assert special.items() <= theirs["special_tokens"].items()
            assert size == 1 + max(theirs["special_tokens"].values())


def test_what_surrounds_a_document_is_read_from_the_tokenizer_or_named(files: dict[str, Path], tmp_path: Path) -> None:
    def around(place: Path | str, **flags: str) -> tuple[int | None, int]:
        tokenizer = find_tokenizer(str(place), **flags)
        return tokenizer.bos_id, tokenizer.eos_id

    assert around(files["wordpiece"]) == (1, 2)  # what its template adds
    assert around(files["wordpiece"], bos_token="", eos_token="[CLS]") == (None, 1)
    assert around(files["sentencepiece"]) == (None, 2)
    assert around(files["sentencepiece"], bos_token="<s>") == (1, 2)
    assert around(files["tekken"]) == (None, 2)
    assert around(files["tiktoken"]) == (None, 100_257)
    assert around(files["rwkv_world"]) == (None, 0)
    shutil.copy(files["unigram"], tmp_path / "tokenizer.json")
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert around(tmp_path) == around(tmp_path / "tokenizer.json") == (None, 1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    assert around(tmp_path) == (0, 1)


def test_a_name_says_which_ids_and_which_borders(files: dict[str, Path], tmp_path: Path) -> None:
    first = find_tokenizer(str(files["wordpiece"]))
    copy = shutil.copy(files["wordpiece"], tmp_path / "other.json")
    assert find_tokenizer(str(copy)).name == first.name == f"tokenizer_json-{first.digest[:12]}"
    others = find_tokenizer(str(copy), "[UNK]"), find_tokenizer(str(files["unigram"]), "</s>")
    assert len({first.name, *(each.name for each in others)}) == 3


def test_an_older_layout_is_converted(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "chunk", "query", "##s", "key", "!"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = find_tokenizer(str(tmp_path))
    text = "Chunks query Keys! unknown"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert [ours.bos_id, *ours.encode(text), ours.eos_id] == theirs.encode(text)


def test_shards_keep_a_copy_and_the_borders(files: dict[str, Path], jsonl: Callable[..., Path], tmp_path: Path) -> None:
    texts = make_texts(40, 3)
    place = shutil.copy(files["wordpiece"], tmp_path / "mine.json")
    options = {"holdout": 0.2, "min_tokens": 4}
    one = prepare([jsonl(texts)], tmp_path / "one", "web", str(place), workers=1, **options)
    with mock.patch.multiple("seqarch.data.sources", PIECE_BYTES=2000):
        many = prepare([jsonl(texts)], tmp_path / "many", "web", str(place), workers=2, **options)
    assert one == many
    Path(place).unlink()
    shutil.move(tmp_path / "one", tmp_path / "moved")
    domain = Domain(tmp_path / "moved" / "web")
    kept = [text for text in texts if len(domain.tokenizer.encode(text)) >= 2]
    documents = [[1, *domain.tokenizer.encode(text), 2] for text in kept]
    written = [tokens_of(domain.folder, split) for split in ("train", "holdout")]
    assert sorted(token for each in written for token in each) == sorted(token for each in documents for token in each)
    assert written[0][0] == 1
    assert domain.manifest.tokenizer == domain.tokenizer.name == one.tokenizer


def wide(path: Path, entries: int = 70_000) -> Path:
    """A tokenizer.json of many words."""
    tokenizer = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(entries)} | {"<unk>": entries}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path


def test_more_than_65536_entries_take_32_bits(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 70_000, 50) for _ in range(40)]
    texts = [" ".join(f"w{i}" for i in each) for each in ids]
    place = wide(tmp_path / "wide.json")
    with mock.patch.multiple("seqarch.data.assemble", CHUNK_TOKENS=500):
        prepare([jsonl(texts)], tmp_path, "web", str(place), eos_token="<unk>", holdout=0.1)
    domain = Domain(tmp_path / "web")
    sequences = domain.sequences("train", 51)
    stream = torch.cat(list(domain.sequences("train", 1)))
    assert stream.dtype == torch.int64
    assert stream.max() > 1 << 16
    found = {tuple(each.tolist()) for each in ids}
    documents = [tuple(each) for each in stream.view(-1, 51)[:, :50].tolist()]
    assert found >= {*documents}
    assert_array_equal(sequences[0], stream[:51])
    assert_array_equal(next(domain.documents("train", 51)), stream[:51])
    domain.check("train")
    path = sequences.shards.paths[0]
    content = bytearray(path.read_bytes())
    content[14] ^= 1  # the high half of the first token
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"chunk-0-0\.bin is damaged"):
        domain.sequences("train", 51)[0]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "the tokenizer's file tokenizer.json is missing in "),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json in .* is not the file of the "),
        (lambda folder: (folder / "seqarch_tokenizer.json").unlink(), "file seqarch_tokenizer.json is missing in "),
        (lambda folder: (folder / "seqarch_tokenizer.json").write_text('{"kind": 3}'), "describes no tokenizer: "),
        (lambda folder: (folder / "seqarch_tokenizer.json").write_text("[]"), "describes no tokenizer: "),
    ],
    ids=range(5),
)
def test_a_copy_that_is_damaged(files: dict[str, Path], tmp_path: Path, spoil: Callable, said: str) -> None:
    tokenizer = find_tokenizer(str(files["wordpiece"]))
    write_tokenizer(tokenizer, tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=said):
        stored_tokenizer(tokenizer.name, tmp_path).encode("text")


def test_a_copy_of_another_tokenizer(files: dict[str, Path], tmp_path: Path) -> None:
    write_tokenizer(find_tokenizer(str(files["wordpiece"])), tmp_path)
    other = find_tokenizer(str(files["unigram"]), "</s>").name
    with pytest.raises(UserError, match=f"holds the tokenizer tokenizer_json-.*, not {other}: restore it"):
        stored_tokenizer(other, tmp_path)


def test_what_is_no_tokenizer(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "tiny.tiktoken").write_text("YQ== 0\nYg== 1\n")
    (tmp_path / "tokenizer.model").write_bytes(b"\x00" * 9)
    (tmp_path / "broken.json").write_text('{"model": {}}')
    (tmp_path / "rwkv_vocab.txt").write_text("1 'a' 1\n2 ''+[]+'' 3\n")
    (tmp_path / "sizes.txt").write_text("1 'a' 2\n")
    (tmp_path / "bytes.txt").write_text("1 'a' 1\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    shutil.copy(files["bpe"], tmp_path / "half/tokenizer.json")
    (tmp_path / "half/tokenizer_config.json").write_text('{"eos_token": "\\ud800"}')
    for given, flags, said in [
        (files["bpe"], {}, r"which token ends a document: name one with --eos_token, of .*<\|endoftext\|>$"),
        (files["bpe"], {"eos_token": "</s>"}, r"bpe\.json has no token '</s>'; its special tokens are <\|endoftext"),
        (files["unigram"], {"eos_token": "</s>", "bos_token": "<s>"}, "has no token '<s>'; its special tokens are"),
        ("byte", {"eos_token": "</s>"}, "'byte' has its own tokens around documents"),
        ("mixtrl", {}, r"unknown tokenizer 'mixtrl': did you mean mixtral\?"),
        ("no/such/tokenizer.json", {}, r"there is no tokenizer 'no/such/tokenizer\.json': name a file, a folder or"),
        (tmp_path / "empty", {}, r"empty holds no tokenizer: expected tokenizer\.json, tekken\.json, "),
        (tmp_path / "vocab.json", {}, r"vocab\.json is neither a tokenizer\.json nor a Tekken file"),
        (tmp_path / "tiny.tiktoken", {}, "how its 2 entries split text is not known: give a tokenizer.json"),
        (tmp_path / "tokenizer.model", {}, r"tokenizer\.model cannot be read by sentencepiece: "),
        (tmp_path / "rwkv_vocab.txt", {}, r"by seqarch: \"2 ''\+\[\]\+'' 3\" is not an id, a literal and a number of"),
        (tmp_path / "sizes.txt", {}, "the entry 1 has 1 bytes, not 2"),
        (tmp_path / "bytes.txt", {}, "no entry is the byte 0"),
        (tmp_path / "half", {}, r"tokenizer_config\.json:1: is not JSON"),
        (tmp_path / "broken.json", {}, r"/broken\.json cannot be read by tokenizers: "),
    ]:
        with pytest.raises(UserError, match=said):
            find_tokenizer(str(given), **flags)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="there is no file 'nobody/nothing', and the Hugging Face Hub gives no"):
        find_tokenizer("nobody/nothing")


@pytest.mark.parametrize("share", [0, 0.5])
def test_half_a_sentencepiece_file_gives_one_line(
    files: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture, share: float
) -> None:
    content = files["sentencepiece"].read_bytes()
    (tmp_path / "a.model").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError, match=r"a\.model cannot be read by sentencepiece: it is not a \.model file, or"):
        find_tokenizer(str(tmp_path / "a.model"))
    assert capfd.readouterr() == ("", "")


def test_only_data_come_from_the_hub(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(files["wordpiece"], tmp_path / "tokenizer.json")
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: asked.update(options) or tmp_path)
    assert find_tokenizer("some/tokenizer").name == find_tokenizer(str(files["wordpiece"])).name
    assert not [
        pattern for pattern in asked["allow_patterns"] if not pattern.endswith((".json", ".model", ".txt", "n"))
    ]


def test_a_missing_library_is_named_with_its_command(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs the package tokenizers: pip install 'seqarch\[tokenizers\]'"):
        find_tokenizer(str(files["bpe"]), "<|endoftext|>")


def test_a_text_that_the_library_cannot_take_is_named(
    files: dict[str, Path], jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    place = jsonl(["a key", " " * 1_000_000, "a query"])
    said = r"texts\.jsonl:2: the tokenizer cannot encode this text of 1,000,000 characters \(.*\): leave it out"
    with pytest.raises(UserError, match=said):
        prepare([place], tmp_path, "web", str(files["tekken"]), holdout=0)
    assert not (tmp_path / "web" / "manifest.json").exists()


def test_a_package_may_bring_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("Reversed", "tests.data.reversed_tokenizer:Reversed", "seqarch.tokenizers")
    monkeypatch.setattr("seqarch.plugins.entries", lambda group: {"Reversed": point})
    load_tokenizer.cache_clear()
    tokenizer = find_tokenizer("Reversed")
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert [each.tolist() for each in tokenizer.encode_batch(["ab"])] == [[98, 97]]
    load_tokenizer.cache_clear()

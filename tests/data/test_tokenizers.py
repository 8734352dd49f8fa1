import importlib.util

import pytest

from seqarch.data.tokenizers import TOKENIZERS, load_tokenizer
from seqarch.errors import UserError

TEXTS = ["", "a key and a query", "naïve état, 東京\n\n\tindented  twice", "def f(x):\n    return x[-1]"]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(name: str, text: str) -> None:
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.eos_id not in ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_batch_is_its_texts_one_by_one(name: str) -> None:
    tokenizer = load_tokenizer(name)
    batch = tokenizer.encode_batch(TEXTS)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text) for text in TEXTS]
    assert all(ids.dtype == "uint16" for ids in batch)


def test_mixtral_is_the_published_vocabulary() -> None:
    assert load_tokenizer("mixtral").encode("Hello world") == [22557, 1526]


def test_the_end_of_a_document_decodes_to_nothing() -> None:
    for name in TOKENIZERS:
        tokenizer = load_tokenizer(name)
        assert tokenizer.decode([*tokenizer.encode("over"), tokenizer.eos_id]) == "over"
        assert tokenizer.decode([*tokenizer.encode("over"), tokenizer.vocab_size]) == "over"  # of a padded model


def test_half_a_character_decodes_to_a_replacement() -> None:
    assert load_tokenizer("byte").decode("é".encode()[:1]) == "\ufffd"


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown tokenizer 'mixtrl': did you mean mixtral"):
        load_tokenizer("mixtrl")


def test_mixtral_needs_its_package_to_encode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["mixtral"]()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (32_000, 2)
    with pytest.raises(UserError, match="pip install mistral-common"):
        tokenizer.encode("text")

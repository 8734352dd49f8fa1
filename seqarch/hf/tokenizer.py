"""The tokenizers of seqarch in the form of Hugging Face's tokenizers."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from seqarch.data import tokenizers as ours
from seqarch.data.codecs import SentencePiece, TokenizerJson
from seqarch.data.tokenizer_files import FileTokenizer
from seqarch.errors import UserError

END = "<|endoftext|>"
"""The text of the token that ends a document, where the tokenizer has none for it."""
SAMPLES = (
    "",
    "Two  words,\n\ttabs",
    " naïve 漢字 🙂 x2",
    "def f(a):\n    return a[0] # 1,234.5",
    "<s></s><|endoftext|>",
)
"""Texts that show whether a converted tokenizer splits, normalises and falls back as its original."""


def as_hugging_face(tokenizer: ours.Tokenizer, length: int, *, document_mask: bool = False) -> PreTrainedTokenizerFast:
    """The same tokenizer for transformers.

    It begins each text as `seqarch eval` and `generate` do (`begin_document`). A text that looks like the token that
    ends a document stays text.

    Args:
        tokenizer: of a model.
        length: tokens of a training sequence.
        document_mask: that of the training data, `data.document_mask`.

    Raises:
        UserError: there is no Hugging Face form of the tokenizer.
    """
    fast = _converted(tokenizer)
    (first,) = ours.begin_document(tokenizer, [])
    border, end = (fast.id_to_token(index) or END for index in (first, tokenizer.eos_id))
    fast.add_special_tokens([AddedToken(each, special=True) for each in dict.fromkeys((border, end))])
    before = f"{border} " if len(ours.begin_document(tokenizer, [first], alone=document_mask)) > 1 else ""
    fast.post_processor = processors.TemplateProcessing(
        single=f"{before}$A", pair=f"{before}$A {before}$B", special_tokens=[(border, first)]
    )
    fast.encode_special_tokens = True
    wanted = (ours.begin_document(tokenizer, tokenizer.encode(text), alone=document_mask) for text in SAMPLES)
    if any((fast.encode(text).ids or [first]) != ids for text, ids in zip(SAMPLES, wanted, strict=True)):
        raise UserError(f"the tokenizer '{tokenizer.name}' has no Hugging Face form: its ids would be others")
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=border,
        eos_token=end,
        pad_token=end,
        model_max_length=length,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _converted(tokenizer: ours.Tokenizer) -> Tokenizer:
    if isinstance(tokenizer, ours.ByteTokenizer):
        return _bytes()
    if isinstance(tokenizer, ours.MixtralTokenizer):
        return _sentence_pieces(tokenizer._model)
    codec = tokenizer._codec if isinstance(tokenizer, FileTokenizer) else None
    if isinstance(codec, TokenizerJson):
        return Tokenizer.from_str(codec.model.to_str())
    if isinstance(codec, SentencePiece):
        return _sentence_pieces(codec.model)
    raise UserError(f"the tokenizer '{tokenizer.name}' has no Hugging Face form: prepare data with a tokenizer.json")


def _bytes() -> Tokenizer:
    """A token for each byte: pieces of one letter that nothing merges."""
    letters = _letters()
    fast = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return fast


def _letters() -> list[str]:
    """The letter for each byte, as byte-level tokenizers have it since GPT-2: itself if it prints, else from 256 on."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(byte) if byte in prints else chr(256 + others.index(byte)) for byte in range(256)]


def _sentence_pieces(model: Any) -> Tokenizer:
    """A byte-pair model of SentencePiece: its pieces by id, and its merges in the order of the scores."""
    pieces = {model.id_to_piece(index): index for index in range(model.get_piece_size())}
    scores = [model.get_score(index) for index in range(len(pieces))]
    merges = [
        (-scores[index], index, (piece[:cut], piece[cut:]))
        for piece, index in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    bpe = models.BPE(
        vocab=pieces,
        merges=[pair for _, _, pair in sorted(merges, key=lambda each: each[:2])],
        unk_token=model.id_to_piece(model.unk_id()),
        fuse_unk=True,
        byte_fallback=True,
    )
    fast = Tokenizer(bpe)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return fast

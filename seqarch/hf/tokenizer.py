"""The tokenizers of seqarch in the form of Hugging Face's tokenizers."""

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from seqarch.data import tokenizers as ours
from seqarch.data.codecs import Codec, RWKVWorld, SentencePiece, Tekken, Tiktoken, TokenizerJson
from seqarch.errors import UserError
from seqarch.hf.world import CODE, RWKVWorldTokenizer, letters

END = "<|endoftext|>"
"""The text of the token that ends a document, where the tokenizer has none for it."""
SAMPLES = (
    "",
    "Two  words,\n\ttabs",
    " naïve 漢字 🙂 x2",
    "def f(a):\n    return a[0] # 1,234.5 \n\n 12345678901",
    "<s></s><|endoftext|><0x41>",
)
"""Texts that show whether a converted tokenizer splits, normalises and falls back as its original."""


def as_hugging_face(tokenizer: ours.Tokenizer, length: int, *, document_mask: bool = False) -> PreTrainedTokenizerBase:
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
    (first,) = ours.begin_document(tokenizer, [])
    begins = len(ours.begin_document(tokenizer, [first], alone=document_mask)) > 1
    options: dict[str, Any] = {
        "model_max_length": length,
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    codec = tokenizer.codec if isinstance(tokenizer, ours.CodecTokenizer) else None
    if isinstance(codec, RWKVWorld):
        return _world(tokenizer, codec, options, begins=begins)
    fast = _converted(tokenizer, codec)
    border, end = (fast.id_to_token(index) or END for index in (first, tokenizer.eos_id))
    fast.add_special_tokens([AddedToken(each, special=True) for each in dict.fromkeys((border, end))])
    before = f"{border} " * begins
    fast.post_processor = processors.TemplateProcessing(
        single=f"{before}$A", pair=f"{before}$A {before}$B", special_tokens=[(border, first)]
    )
    fast.encode_special_tokens = True
    wanted = (ours.begin_document(tokenizer, tokenizer.encode(text), alone=document_mask) for text in SAMPLES)
    if any((fast.encode(text).ids or [first]) != ids for text, ids in zip(SAMPLES, wanted, strict=True)):
        raise UserError(f"the tokenizer '{tokenizer.name}' has no Hugging Face form: its ids would be others")
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token=border, eos_token=end, pad_token=end, **options)


def _world(tokenizer: ours.Tokenizer, codec: RWKVWorld, options: dict[str, Any], *, begins: bool) -> RWKVWorldTokenizer:
    (end,) = codec.special_tokens()
    around = {"bos_token": end, "eos_token": end, "pad_token": end}
    auto_map = {"AutoTokenizer": [f"{CODE}.{RWKVWorldTokenizer.__name__}", None]}
    with TemporaryDirectory() as folder:
        path = Path(folder, codec.file)
        path.write_bytes(tokenizer.files[codec.file])
        return RWKVWorldTokenizer(str(path), begins=begins, auto_map=auto_map, **around, **options)


def _converted(tokenizer: ours.Tokenizer, codec: Codec | None) -> Tokenizer:
    if isinstance(tokenizer, ours.ByteTokenizer):
        return _byte_pairs({bytes([byte]): byte for byte in range(256)})
    if isinstance(codec, TokenizerJson):
        return Tokenizer.from_str(codec.model.to_str())
    if isinstance(codec, SentencePiece):
        return _sentence_pieces(codec.model)
    if isinstance(codec, Tiktoken):
        return _byte_pairs(codec.ranks, codec.pattern, codec.special)
    if isinstance(codec, Tekken):
        content, special = json.loads(tokenizer.files[codec.file]), codec.special_tokens()
        entries = content["vocab"][: codec.vocab_size - len(special)]
        ids = {base64.b64decode(entry["token_bytes"]): len(special) + entry["rank"] for entry in entries}
        return _byte_pairs(ids, content["config"]["pattern"], special)
    raise UserError(f"the tokenizer '{tokenizer.name}' has no Hugging Face form: prepare data with a tokenizer.json")


def _byte_pairs(
    ids: Mapping[bytes, int], pattern: str | None = None, special: Mapping[str, int] | None = None
) -> Tokenizer:
    """Pairs of bytes, merged in the order of their ids within the parts that `pattern` finds, as tiktoken does."""
    names = {entry: letters(entry) for entry in ids}
    merges = [
        (names[entry[:cut]], names[entry[cut:]])
        for entry in sorted(ids, key=ids.__getitem__)
        for cut in range(1, len(entry))
        if entry[:cut] in ids and entry[cut:] in ids
    ]
    vocab = {**(special or {}), **{names[entry]: index for entry, index in ids.items()}}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    parts: list[pre_tokenizers.PreTokenizer] = []
    if pattern is not None:
        parts.append(pre_tokenizers.Split(Regex(_in_onigurumas_syntax(pattern)), behavior="isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    fast.pre_tokenizer = pre_tokenizers.Sequence(parts)
    fast.decoder = decoders.ByteLevel()
    return fast


def _in_onigurumas_syntax(pattern: str) -> str:
    """There `$` also matches before line ends, and a `+` after `{1,3}` repeats it."""
    return pattern.replace("$", r"\z").replace("{1,3}+", "{1,3}")


def _sentence_pieces(processor: Any) -> Tokenizer:
    """A model of SentencePiece: pairs merged in the order of their scores, or unigrams."""
    proto: Any = pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue] - made at import
    proto.ParseFromString(processor.serialized_model_proto())
    whole = [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]
    never = [piece.piece for piece in proto.pieces if piece.type not in (piece.NORMAL, piece.USER_DEFINED)]
    unigrams = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
    fast = Tokenizer(_unigrams(proto) if unigrams else _pairs(proto, ignore_merges=bool(whole)))
    spec = proto.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts: list[pre_tokenizers.PreTokenizer] = []
    if whole:
        parts.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, whole))), behavior="isolated"))
    if unigrams and never:  # text that reads like such a piece is cut before its last letter, so that none matches
        last = "|".join(f"(?<={re.escape(piece[:-1])}){re.escape(piece[-1])}" for piece in never)
        parts.append(pre_tokenizers.Split(Regex(last), behavior="merged_with_next"))
    if parts:
        fast.pre_tokenizer = pre_tokenizers.Sequence(parts)
    strip = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return fast


def _unigrams(proto: Any) -> models.Model:
    scores = [(piece.piece, piece.score) for piece in proto.pieces]
    return models.Unigram(scores, proto.trainer_spec.unk_id, byte_fallback=proto.trainer_spec.byte_fallback)


def _pairs(proto: Any, *, ignore_merges: bool) -> models.Model:
    """Byte pairs; with `ignore_merges`, a part of the text that is a piece stays whole."""
    pieces = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    merges = [
        (-proto.pieces[index].score, index, (piece[:cut], piece[cut:]))
        for piece, index in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return models.BPE(
        vocab=pieces,
        merges=[pair for _, _, pair in sorted(merges, key=lambda each: each[:2])],
        unk_token=proto.pieces[proto.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        ignore_merges=ignore_merges,
    )

"""Convert a SentencePiece model (`tokenizer.model`) of Llama-style checkpoints to a Hugging Face tokenizer.

transformers can convert these too, but its results differ between versions: 5.0 loses one of several leading spaces and
adds tokens that the model has no embedding for. This conversion is checked against SentencePiece itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from djl_trtllm.errors import TokenizerError
from djl_trtllm.model.tokenizer_conversion import PROBES

FILES = ("tokenizer.model", "spiece.model")

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # SentencePiece.Type


def read(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer and its named special tokens.

    `config` is tokenizer_config.json: `legacy` and `add_prefix_space` are honoured. A BOS token precedes every text if
    the model has one (the default of Llama, Gemma and related models). Raises `TokenizerError` if the file is not a
    SentencePiece model, or if the conversion and SentencePiece disagree.
    """
    content = file.read_bytes()
    proto, reference = _parse(file, content)
    raw = _model(proto, file)
    legacy = config.get("legacy", True) is not False
    prefix = config.get("add_prefix_space")
    if not isinstance(prefix, bool):
        prefix = bool(proto.normalizer_spec.add_dummy_prefix)
    _set_spaces(raw, proto.normalizer_spec, prefix, legacy)
    special = {_UNKNOWN, _CONTROL}
    raw.add_tokens(
        [
            tokenizers.AddedToken(piece.piece, normalized=False, special=piece.type in special)
            for piece in proto.pieces
            if piece.type in special or piece.type == _USER_DEFINED
        ]
    )
    if prefix == bool(proto.normalizer_spec.add_dummy_prefix):
        # Without `legacy`, leading spaces differ on purpose.
        texts = [probe if legacy else probe.lstrip() for probe in PROBES]
        check(raw, [(text, reference.encode(text)) for text in texts], file)
    tokens = _named(proto)
    if bos := tokens.get("bos_token"):
        add_affixes(raw, [bos], [])
    return raw, tokens


def add_affixes(raw: tokenizers.Tokenizer, before: list[str], after: list[str]) -> None:
    """Make encoding add these special tokens before and after a text."""
    single = [f"{piece}:0" for piece in (*before, "$A", *after)]
    second = [f"{piece}:1" for piece in (*before, "$B", *after)]
    special_tokens = [(token, raw.token_to_id(token)) for token in (*before, *after)]
    raw.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *second], special_tokens=special_tokens
    )


def _parse(file: Path, content: bytes) -> tuple[Any, Any]:
    """The model as a protocol buffer and as SentencePiece's own processor."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    reference = sentencepiece.SentencePieceProcessor()
    try:
        proto.ParseFromString(content)
        reference.LoadFromSerializedProto(content)
    except Exception as error:  # protobuf's errors depend on its implementation
        pointer = content.startswith(b"version http")
        remedy = "it is a Git LFS pointer, fetch it with `git lfs pull`" if pointer else "copy it again"
        raise TokenizerError(
            f"{file} ({len(content):,} bytes) is not a SentencePiece model: {error}; {remedy}"
        ) from error
    return proto, reference


def _model(proto: Any, file: Path) -> tokenizers.Tokenizer:
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    unknown = next((id_ for id_, piece in enumerate(proto.pieces) if piece.type == _UNKNOWN), None)
    byte_fallback = bool(proto.trainer_spec.byte_fallback)
    if proto.trainer_spec.model_type == _UNIGRAM:
        return tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=byte_fallback))
    if proto.trainer_spec.model_type != _BPE:
        raise TokenizerError(
            f"{file} is a SentencePiece model of an unknown type ({proto.trainer_spec.model_type}); "
            "expected BPE or unigram; add a tokenizer.json"
        )
    return tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: id_ for id_, (piece, _) in enumerate(pieces)},
            merges=_merges(proto),
            unk_token=None if unknown is None else pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )


def _merges(proto: Any) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose joined piece has the best score; pairs that give one piece, in any order."""
    ids = {piece.piece: id_ for id_, piece in enumerate(proto.pieces) if piece.type not in (_CONTROL, _UNKNOWN, _BYTE)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, id_ in ids.items():
        for border in range(1, len(piece)):
            left, right = piece[:border], piece[border:]
            if left in ids and right in ids:
                ranked.append((-proto.pieces[id_].score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _set_spaces(raw: tokenizers.Tokenizer, spec: Any, prefix: bool, legacy: bool) -> None:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    if legacy:
        # The first text after a special token also gets the prefix: Llama 2 was trained that way.
        steps += [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]
    else:
        scheme = "first" if prefix else "never"
        raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    if steps:
        raw.normalizer = normalizers.Sequence(steps)
    back: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*back, *([decoders.Strip(content=" ", left=1)] if prefix else [])])


def check(raw: tokenizers.Tokenizer, probes: Iterable[tuple[str, list[int]]], file: Path) -> None:
    """Raise `TokenizerError` unless `raw` encodes every probe to the ids beside it."""
    for text, expected in probes:
        ids = raw.encode(text, add_special_tokens=False).ids
        if ids != expected:
            raise TokenizerError(
                f"{file} cannot be converted: {text!r} is {expected} in the original and {ids} in the conversion; add "
                "a tokenizer.json (transformers writes one: `AutoTokenizer.from_pretrained(…).save_pretrained(…)`)"
            )


def _named(proto: Any) -> dict[str, str]:
    spec = proto.trainer_spec
    ids = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "unk_token": spec.unk_id, "pad_token": spec.pad_id}
    return {
        name: proto.pieces[id_].piece
        for name, id_ in ids.items()
        if 0 <= id_ < len(proto.pieces) and proto.pieces[id_].type in (_UNKNOWN, _CONTROL)
    }

"""Convert tokenizers that have no `tokenizer.json`: SentencePiece models and Qwen 1's here, others by transformers.

transformers can convert SentencePiece models (`tokenizer.model`) too, but its results differ between versions: 5.0
loses one of several leading spaces and adds tokens that the model has no embedding for. The conversion here is
checked against SentencePiece itself. For the other formats transformers stays out of the server's memory: the
subprocess runs a model's own Python code, if that is allowed, and imports no torch.
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from djl_trtllm.errors import TokenizerError
from djl_trtllm.files import MOST_TOKENIZER_BYTES
from djl_trtllm.model.checkpoint import bounded, content_of, read_object

FILES = ("tokenizer.model", "spiece.model")

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # SentencePiece.Type
# Messages of sentencepiece_model.proto: the number, type and default of each field that is read here. Enums are INT32.
_MESSAGES: dict[str, dict[str, tuple[int, str, str]]] = {
    "SentencePiece": {"piece": (1, "STRING", ""), "score": (2, "FLOAT", "0"), "type": (3, "INT32", "1")},
    "TrainerSpec": {
        "model_type": (3, "INT32", "1"),
        "byte_fallback": (35, "BOOL", "false"),
        "unk_id": (40, "INT32", "0"),
        "bos_id": (41, "INT32", "1"),
        "eos_id": (42, "INT32", "2"),
        "pad_id": (43, "INT32", "-1"),
    },
    "NormalizerSpec": {
        "precompiled_charsmap": (2, "BYTES", ""),
        "add_dummy_prefix": (3, "BOOL", "true"),
        "remove_extra_whitespaces": (4, "BOOL", "true"),
    },
    "ModelProto": {
        "pieces": (1, "SentencePiece", "repeated"),
        "trainer_spec": (2, "TrainerSpec", ""),
        "normalizer_spec": (3, "NormalizerSpec", ""),
    },
}


def read(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer and its named special tokens.

    `config` is tokenizer_config.json: `legacy` and `add_prefix_space` are honoured. A BOS token precedes every text if
    the model has one (the default of Llama, Gemma and related models). Raises `TokenizerError` if the file is not a
    SentencePiece model, or if the conversion and SentencePiece disagree.
    """
    content = content_of(file, MOST_TOKENIZER_BYTES, TokenizerError)
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

    proto = _message_class()()
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


def _message_class() -> Any:
    """The class of SentencePiece's message `ModelProto`, with the fields of `_MESSAGES` alone.

    SentencePiece's own generated module needs the protobuf that it was generated for: that of 0.2.2 refuses protobuf 6.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece_model", package="sentencepiece", syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, (number, kind, default) in fields.items():
            label = "LABEL_REPEATED" if default == "repeated" else "LABEL_OPTIONAL"
            field = described.field.add(name=name, number=number, label=label)
            if kind in _MESSAGES:
                field.type_name = f".sentencepiece.{kind}"
            else:
                field.type = f"TYPE_{kind}"
                field.default_value = default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("sentencepiece.ModelProto"))


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
    """The merges of a SentencePiece model, best score first; pairs that give one piece come in any order."""
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


# -- Qwen 1: its tokenizer is Python code, which reads a file of tiktoken ----------------------------------------------

QWEN_FILE = "qwen.tiktoken"
_QWEN_END = "<|endoftext|>"
_MOST_RANK = 1 << 24
_QWEN_SPECIAL = (_QWEN_END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_qwen(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Qwen 1's tokenizer and its named special tokens, without the model's code. Raises `TokenizerError`."""
    content = content_of(file, MOST_TOKENIZER_BYTES, TokenizerError)
    try:
        lines = [line.split() for line in content.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        if not all(0 <= rank < _MOST_RANK for rank in ranks.values()):
            raise ValueError(f"ranks from {min(ranks.values())} to {max(ranks.values())}")
    except ValueError as error:
        raise TokenizerError(
            f"{file} is not a tiktoken file: {error}; expected lines of a token in base64 and its rank: copy it again"
        ) from error
    shown = _shown_bytes()
    text = {token: "".join(shown[byte] for byte in token) for token in ranks}
    # tiktoken joins the pair whose joined token has the lowest rank.
    merges = sorted(
        (rank, ranks[token[:border]], ranks[token[border:]], token[:border], token[border:])
        for token, rank in ranks.items()
        for border in range(1, len(token))
        if token[:border] in ranks and token[border:] in ranks
    )
    raw = tokenizers.Tokenizer(
        models.BPE(
            vocab={text[token]: rank for token, rank in ranks.items()},
            merges=[(text[left], text[right]) for *_, left, right in merges],
        )
    )
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in _QWEN_SPECIAL])
    return raw, {"eos_token": _QWEN_END, "pad_token": _QWEN_END}


def _shown_bytes() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself, or one from 256 on for the others."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


# -- conversion by transformers ----------------------------------------------------------------------------------------

PROBES = (
    "Tell me a story of the little red riding hood.",
    "Once upon a time, in 1837,\nthere were two wolves:\t  one  grey, one black.\n\n",
    "Grüße, señor! 你好世界。こんにちは Привет مرحبا 🐺🧺 ﬁn ½",
    "def f(x):\n    return {'a': x ** 2}  # 3.14159",
    " leading and trailing ",
)
"""Texts on which two forms of a tokenizer must agree."""

TIMEOUT = 600.0
"""Time limit of a conversion, in seconds."""

# The subprocess imports from the same path as this process.
_PROCESS = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from djl_trtllm.model import tokenizer_formats
tokenizer_formats.run(*sys.argv[2:])
"""

_FACTS = "facts.json"
SOURCES = ("*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class Converted:
    file: Path | None
    """The tokenizer.json; None for a tokenizer in Python code without such a form."""
    special_tokens: dict[str, str]
    probes: list[tuple[str, list[int]]]
    """Texts and their ids, without special tokens."""
    affixes: dict[str, bool]
    """`add_bos_token` and `add_eos_token` as observed."""


def missing(path: Path) -> TokenizerError:
    """The error about a model directory without a tokenizer."""
    shown = bounded(sorted(entry.name for entry in path.iterdir()))
    return TokenizerError(
        f"{path} has no tokenizer: found {shown or 'nothing'}; expected tokenizer.json, or tokenizer.model "
        "(SentencePiece), or vocab.json with merges.txt. They are part of the Hugging Face model: copy them beside "
        "config.json, or name a directory or a model that has them with option.tokenizer"
    )


def convert(path: Path, into: Path, *, trust_remote_code: bool) -> Converted:
    """Convert the tokenizer of the directory `path` and write it to the directory `into`.

    Raises `TokenizerError` if `path` has no tokenizer files, if they cannot be converted, or if converting needs the
    model's own code and `trust_remote_code` is False.
    """
    remote = _remote_code(path)
    if not remote and not any(any(path.glob(pattern)) for pattern in SOURCES):
        raise missing(path)
    if remote and not trust_remote_code:
        raise TokenizerError(
            f"the tokenizer of {path} is Python code that comes with the model ({remote}); read it, and if you trust "
            "it set option.trust_remote_code=true (OPTION_TRUST_REMOTE_CODE=true), or add a tokenizer.json"
        )
    # -I: the working directory may have a json.py.
    command = [sys.executable, "-I", "-c", _PROCESS, json.dumps(sys.path), str(path), str(into), str(trust_remote_code)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if not trust_remote_code:
        environment["HF_HUB_OFFLINE"] = "1"  # all needed files are in the directory
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TokenizerError(f"converting the tokenizer of {path} took longer than {TIMEOUT:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        tail = "\n".join(f"  | {line}" for line in lines[-12:])
        raise TokenizerError(
            f"the tokenizer of {path} could not be converted to a tokenizer.json; add one (transformers writes it with "
            f"`AutoTokenizer.from_pretrained(...).save_pretrained(...)`). Last lines of the conversion:\n{tail}"
        )
    facts = json.loads((into / _FACTS).read_text(encoding="utf-8"))
    file = into / "tokenizer.json"
    return Converted(file if file.is_file() else None, **facts)


def _remote_code(path: Path) -> str | None:
    """The class that tokenizer_config.json loads from the model's own files, if any."""
    auto_map = (read_object(path / "tokenizer_config.json", TokenizerError) or {}).get("auto_map")
    classes = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    names = [name for name in classes if name] if isinstance(classes, list) else [classes]
    return str(names[-1]) if names and names[-1] else None


def run(source: str, into: str, trust_remote_code: str) -> None:
    """Convert; runs in the process that `convert` starts."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers do not need it, and loading it takes seconds
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code == "True")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.save(str(Path(into) / "tokenizer.json"))
    full = tokenizer.encode(PROBES[0])
    facts = {
        "special_tokens": {key: str(token) for key, token in tokenizer.special_tokens_map.items() if _is_text(token)},
        "probes": [(probe, tokenizer.encode(probe, add_special_tokens=False)) for probe in PROBES],
        "affixes": {
            "add_bos_token": tokenizer.bos_token_id is not None and full[0] == tokenizer.bos_token_id,
            "add_eos_token": tokenizer.eos_token_id is not None and full[-1] == tokenizer.eos_token_id,
        },
    }
    (Path(into) / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _is_text(token: Any) -> bool:
    return not isinstance(token, (list, dict)) and bool(str(token))

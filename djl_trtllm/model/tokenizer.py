"""A model's tokenizer: text to ids and back, chat messages to ids, and the ids that end a text.

The `tokenizers` library reads `tokenizer.json`; `tokenizer_formats` converts the others.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors

from djl_trtllm.errors import InvalidRequestError, PromptTooLongError, RequestError, TokenizerError
from djl_trtllm.files import MOST_TOKENIZER_BYTES
from djl_trtllm.model import chat_template, tokenizer_formats
from djl_trtllm.model.checkpoint import ModelShape, check_values, content_of, is_lfs_pointer, read_object
from djl_trtllm.model.layout import Layout
from djl_trtllm.model.work_directory import temporary_directory

# -- checks before a compilation ---------------------------------------------------------------------------------------


def require_tokenizer(layout: Layout) -> None:
    """Raise TokenizerError if neither the model nor the engine inside it has tokenizer files."""
    if layout.tokenizer_dir is None and layout.bundled_engine is None:
        raise tokenizer_formats.missing(layout.path)


def load_fitting_tokenizer(
    layout: Layout, *, trust_remote_code: bool, template: Callable[[], str] | None = None
) -> Tokenizer | None:
    """The tokenizer beside the model, if it fits; None if it is known only with the engine.

    Raises TokenizerError: there is none, it cannot be loaded, or it is that of another model.
    """
    require_tokenizer(layout)
    if layout.tokenizer_dir is None:
        return None
    tokenizer = load_tokenizer(layout.tokenizer_dir, trust_remote_code=trust_remote_code, template=template)
    check_vocabulary(tokenizer, layout)
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, layout: Layout) -> None:
    """Raise TokenizerError if texts have ids that the model has no embedding for.

    Tokens that were added to the vocabulary may be beyond the model's, if no ordinary text has them: Gemma 3 of 1B has
    the token of images, and fine-tuned models have a token for padding.
    """
    size = _model_ids(layout)
    if size is None or tokenizer.vocab_size <= size:
        return
    highest = max(tokenizer.raw.get_vocab(with_added_tokens=False).values(), default=-1)
    affixes = [id_ for id_ in tokenizer.encode("") if id_ >= size]
    if highest < size and not affixes:
        return
    found = f"ids up to {highest}" if highest >= size else f"the id {affixes[0]} in every prompt"
    raise TokenizerError(
        f"the tokenizer in {layout.tokenizer_dir} has {found}, and the model in {layout.path} knows ids up to "
        f"{size - 1} (vocab_size {size} in config.json): it is the tokenizer of another model; copy the one that "
        "belongs to the model, or name it with option.tokenizer"
    )


def vocabulary_difference(model: Layout, draft: Layout) -> str:
    """The first token that the draft has with another id than the model, "" for none or where the files do not say."""
    files = [(each.tokenizer_dir or each.path) / "tokenizer.json" for each in (model, draft)]
    if not all(file.is_file() for file in files):
        sizes = [_model_ids(each) for each in (model, draft)]
        return "" if None in sizes or sizes[0] == sizes[1] else f"it has {sizes[1]} tokens, and the model {sizes[0]}"
    ours, theirs = (_read_tokenizer(file).get_vocab(with_added_tokens=True) for file in files)
    other = min((ids := ours | theirs).keys(), key=lambda token: (ours.get(token) == theirs.get(token), ids[token]))
    if ours.get(other) == theirs.get(other):
        return ""
    return f"token {other!r} is {theirs.get(other, 'missing')} there, and {ours.get(other, 'missing')} in the model"


def outside(tokenizer: Tokenizer, layout: Layout) -> int | None:
    """The number of ids that the model knows, if the tokenizer has higher ones; otherwise None."""
    size = _model_ids(layout)
    return size if size is not None and tokenizer.vocab_size > size else None


def _model_ids(layout: Layout) -> int | None:
    # Not `layout.shape`, which reads the headers of all weight files.
    return ModelShape.from_config(layout.config or {}).vocab_size


# -- texts of tokens ---------------------------------------------------------------------------------------------------

_BYTE = "<0x"
_UNFINISHED = "\ufffd"


class TokenTexts(dict[int, str | None]):
    """The text that a token adds to a text, by id; None if that depends on the tokens around it.

    It is the same everywhere for whole characters, if the decoder joins the texts of its tokens (`_joins`) and the
    token is not the first one: decoders of SentencePiece's kind take the first space away. Texts are computed when they
    are looked up.
    """

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        super().__init__()
        self.raw = raw
        anchor = raw.token_to_id("a")
        self._anchor: int | None = anchor if _joins(raw.decoder) else None

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str | None:
        if self._anchor is None:
            return None
        token: str | None = self.raw.id_to_token(token_id)
        if token is None or token.startswith(_BYTE):
            return None
        before: str = self.raw.decode([self._anchor])
        text: str = self.raw.decode([self._anchor, token_id])
        if not text.startswith(before) or _UNFINISHED in text:
            return None
        return text[len(before) :] or None


def _joins(decoder: Any) -> bool:
    """Return whether the decoder joins the text or bytes of each token, and at most strips the start."""
    if decoder is None:
        return False
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # a decoder written in Python
        return False
    kinds = [_kind(step) for step in (state["decoders"] if state["type"] == "Sequence" else [state])]
    if "Fuse" not in kinds:
        return kinds in (["ByteLevel"], ["Metaspace"])
    fuse = kinds.index("Fuse")
    return set(kinds[:fuse]) <= {"Replace", "ByteFallback"} and set(kinds[fuse + 1 :]) <= {"Strip"}


def _kind(step: dict[str, Any]) -> str:
    kind: str = step["type"]
    # A regular expression may look at more than a token, and the end of a text is not known yet.
    beyond = (kind == "Replace" and "String" not in step["pattern"]) or (kind == "Strip" and step["stop"])
    return "" if beyond else kind


logger = logging.getLogger(__name__)

# For these classes transformers (4.57) reads `add_bos_token` and `add_eos_token` from tokenizer_config.json; for all
# others it uses tokenizer.json.
_AFFIX_CLASSES = {
    f"{family}Tokenizer{suffix}"
    for family in ("Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX")
    for suffix in ("", "Fast")
}
# A thread for every core is no help with one text, and the threads stay.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_LONG_TEXT = 1024
"""Longer texts are encoded without the GIL; for shorter ones a single call is cheaper."""
_TEXTS_AT_ONCE = 64
"""The texts that one call encodes: until its end it holds up to a hundred bytes of memory for a character."""
_LARGEST_ID = 2**31 - 1
_LARGEST_DIGITS = 10
_CHARACTERS_OF_A_TOKEN = 16
_LEAST_PART = 65_536
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes and decodes like the model's Hugging Face tokenizer. Thread-safe.

    One difference from transformers' `decode`: `clean_up_tokenization_spaces` is never applied, because it changes text
    that a stream has already sent.
    """

    raw: tokenizers.Tokenizer
    """The Rust tokenizer, for `tokenizers.decoders.DecodeStream`. Do not change it."""
    texts: TokenTexts
    """The texts of the tokens that have the same one everywhere."""
    end_ids: frozenset[int]
    """Every id that ends a text, from generation_config.json, config.json and the tokenizer."""
    special_ids: frozenset[int]
    """Ids that `skip_special_tokens` leaves out."""
    vocab_size: int
    """The highest id of the tokenizer plus one. The model's logits may be wider (padding)."""
    pad_id: int | None
    bos_id: int | None
    longest_token: int | None
    """The largest number of characters that one token can encode; None if there is no limit."""
    chat_templates: tuple[dict[str, str], dict[str, Any], Path]
    """The arguments of `ChatTemplate`: another process renders the conversations of requests."""

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, Any],
        end_ids: Iterable[int],
        templates: Mapping[str, str],
        origin: Path,
    ) -> None:
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw
        self.texts = TokenTexts(raw)
        self._chat_template = chat_template.ChatTemplate(templates, special_tokens, origin)
        self._chat_template.compile()  # not where it is unpickled: hostile templates take seconds of the GIL
        self.chat_templates = (dict(templates), dict(special_tokens), origin)
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        vocabulary = raw.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.pad_id = self._id_of(special_tokens.get("pad_token"))
        self.bos_id = self._id_of(special_tokens.get("bos_token"))
        self.longest_token = _longest_token(raw, vocabulary)
        own_end = self._id_of(special_tokens.get("eos_token"))
        self.end_ids = frozenset(end_ids) | (frozenset() if own_end is None else {own_end})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chat_template": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _chat_template=chat_template.ChatTemplate(*state["chat_templates"]))

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Encode `text`; `add_special_tokens` adds those that the model expects around a text (often a BOS token).

        Encodes without the GIL, so that other threads can run. Raises `InvalidRequestError` if the
        text is not valid Unicode (a lone surrogate) or the tokenizer fails on it, and `PromptTooLongError` for more
        than `most` tokens.
        """
        try:
            # `encode` holds the GIL all the time, seconds for a megabyte, and takes longer: it also finds offsets.
            part = len(text) if most is None else _CHARACTERS_OF_A_TOKEN * most + _LEAST_PART
            if 2 * part < len(text):
                # A hundred bytes of memory for a character: a part of the text may be enough.
                (encoding,) = self.raw.encode_batch_fast([text[:part]], add_special_tokens=add_special_tokens)
                _require_few(2 * len(encoding) // 3, most, "more than ")
            (encoding,) = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"the prompt is not valid Unicode text: {_reason(text, error)}") from error
        except RequestError:
            raise
        except BaseException as error:
            if not is_panic(error) and not isinstance(error, Exception):
                raise
            raise InvalidRequestError(f"the model's tokenizer fails on this text: {error}") from error
        _require_few(len(encoding), most)
        ids: list[int] = encoding.ids
        return ids

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int] | Exception]:
        """Encode short texts as `encode` does, in calls of many texts, each of which waits for the GIL once.

        Where a text has no ids, there is the exception that `encode` raises for it.
        """
        if len(texts) > _TEXTS_AT_ONCE:
            parts = (texts[at : at + _TEXTS_AT_ONCE] for at in range(0, len(texts), _TEXTS_AT_ONCE))
            return [ids for part in parts for ids in self.encode_all(part, add_special_tokens)]
        try:
            encodings = self.raw.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
        except BaseException:  # a panic is no Exception; `encode` says which text it is, and why
            return [self._ids_or_error(text, add_special_tokens) for text in texts]

    def _ids_or_error(self, text: str, add_special_tokens: bool) -> list[int] | Exception:
        try:
            return self.encode(text, add_special_tokens)
        except Exception as error:
            return error

    def surround(self, first: Sequence[int], second: Sequence[int] | None, most: int | None) -> tuple[list[int], int]:
        """A text or a pair of texts, encoded without special tokens, as a model sees it, and where the second begins.

        It has at most `most` tokens: their ends are left out, that of the longer text first. The place is 0 for a
        single text, and for models that do not distinguish the texts.
        """
        before, between, after, typed = self._affixes[second is not None]
        other = second or ()
        if most is not None:
            room = max(0, most - len(before) - len(between) - len(after))
            if len(first) + len(other) > room:
                shorter = min(len(first), len(other), room // 2)
                longer = room - shorter
                lengths = (shorter, longer) if len(first) <= len(other) else (longer, shorter)
                first, other = first[: lengths[0]], other[: lengths[1]]
        start = 0 if typed is None else len(before) + len(first) + typed
        return [*before, *first, *between, *other, *after][:most], start

    @cached_property
    def _affixes(self) -> tuple[_Affixes, _Affixes]:
        """The special tokens around a text, and those around and between two."""
        return _affixes(self.raw.encode("a")), _affixes(self.raw.encode("a", "a"))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> str:
        """The prompt of a conversation, to be encoded without special tokens: the template decides about them.

        Keywords and errors are those of `ChatTemplate.render`.
        """
        return self._chat_template.render(messages, **template_kwargs)

    def chat_source(self, with_tools: bool = False) -> str:
        """The chat template of conversations with or without tools, "" if the model has none."""
        return self._chat_template.source(with_tools)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode `ids`; an incomplete UTF-8 sequence at the end gives a replacement character."""
        text: str
        if len(ids) > _LONG_TEXT:
            (text,) = self.raw.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        else:
            text = self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def _id_of(self, token: Any) -> int | None:
        id_: int | None = self.raw.token_to_id(token) if isinstance(token, str) else None
        return id_


class _Affixes(NamedTuple):
    """Special tokens, and where behind the first text tokens get the type of the second; None for never."""

    before: list[int]
    between: list[int]
    after: list[int]
    typed: int | None


def _affixes(encoding: tokenizers.Encoding) -> _Affixes:
    ids, places = encoding.ids, encoding.sequence_ids
    own = [at for at, place in enumerate(places) if place is not None]
    end = max((at for at, place in enumerate(places) if place == 0), default=len(ids) - 1) + 1
    second = places.index(1) if 1 in places else end
    typed = encoding.type_ids.index(1) - end if 1 in encoding.type_ids else None
    return _Affixes(ids[: own[0]] if own else [], ids[end:second], ids[own[-1] + 1 :] if own else [], typed)


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust has panicked: its exception is no `Exception`.

    tokenizers panics where the regular expression of a tokenizer takes too many steps.
    """
    return type(error).__name__ == "PanicException"


def _require_few(tokens: int, most: int | None, about: str = "") -> None:
    if most is not None and tokens > most:
        raise PromptTooLongError(
            f"the prompt has {about}{tokens} tokens, and max_input_len is {most}: "
            "shorten it, or raise option.max_input_len"
        )


def load_tokenizer(
    path: Path, *, trust_remote_code: bool = False, template: Callable[[], str] | None = None
) -> Tokenizer:
    """Load the tokenizer of the model directory `path`.

    Reads `tokenizer.json`, or else `tokenizer.model` (SentencePiece) or Qwen 1's `qwen.tiktoken`. transformers first
    converts vocabulary and other tiktoken files, which takes some seconds; with `trust_remote_code` that conversion
    may run the model's own Python code. `template` returns the chat template that replaces the model's. Raises
    `TokenizerError`.
    """
    if not path.is_dir():
        raise TokenizerError(f"no tokenizer at {path}: not a directory")
    config = _read_json(path / "tokenizer_config.json")
    tokens = _special_tokens(config, _read_json(path / "special_tokens_map.json"))
    raw, own_tokens = _open(path, config, trust_remote_code)
    tokens = {**own_tokens, **tokens}
    _add_tokens(raw, config, path)
    _mark_special(raw, tokens)
    config_json = _read_json(path / "config.json")
    nested = config_json.get("text_config")
    own = [config_json, nested] if isinstance(nested, dict) else [config_json]
    model_configs = [_read_json(path / "generation_config.json"), *own]
    for name in ("bos_token", "eos_token", "pad_token"):
        # With tokenizer.json alone, only the model's configuration names special tokens, by id. These ids are often
        # mere defaults, so use them only if the tokenizer also treats them as special.
        token = raw.get_added_tokens_decoder().get(next(iter(_ids(model_configs, f"{name}_id")), -1))
        if name not in tokens and token is not None and token.special:
            tokens[name] = token.content
    if not (path / "tokenizer.json").is_file() or str(config.get("tokenizer_class")) in _AFFIX_CLASSES:
        _set_affixes(raw, config, tokens)
    return Tokenizer(
        raw,
        special_tokens=tokens,
        end_ids=_ids(model_configs, "eos_token_id"),
        templates=chat_template.read_sources(path, config) if template is None else {chat_template.DEFAULT: template()},
        origin=path,
    )


def _open(
    path: Path, config: dict[str, Any], trust_remote_code: bool
) -> tuple[tokenizers.Tokenizer, Mapping[str, Any]]:
    """The tokenizer and the special tokens that its own files name."""
    if (path / "tokenizer.json").exists():
        return _read_tokenizer(path / "tokenizer.json"), {}
    if (path / tokenizer_formats.QWEN_FILE).is_file():
        return tokenizer_formats.read_qwen(path / tokenizer_formats.QWEN_FILE)
    models = [path / name for name in tokenizer_formats.FILES if (path / name).is_file()]
    if models and "auto_map" not in config:
        return tokenizer_formats.read(models[0], config)
    with temporary_directory() as directory:
        converted = tokenizer_formats.convert(path, Path(directory), trust_remote_code=trust_remote_code)
        config.update(converted.affixes)
        if converted.file is not None:
            return _read_tokenizer(converted.file), converted.special_tokens
    if not models:
        raise TokenizerError(
            f"the tokenizer of {path} exists only as Python code, which cannot stream text; add a tokenizer.json"
        )
    # The code of InternLM and Baichuan, for example, wraps the SentencePiece model beside it.
    raw, tokens = tokenizer_formats.read(models[0], config)
    tokenizer_formats.check(raw, converted.probes, models[0])
    return raw, {**tokens, **converted.special_tokens}


_MOST_VALUES = 4_000_000
"""Reading holds the GIL, about a second for two million. The largest known ones have that many, most of them merges."""


def _read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    content = content_of(file, MOST_TOKENIZER_BYTES, TokenizerError)
    try:
        check_values(content, _MOST_VALUES)
        return tokenizers.Tokenizer.from_buffer(content)
    except BaseException as error:  # the Rust library raises bare Exception, or panics
        if not is_panic(error) and not isinstance(error, Exception):
            raise
        if is_lfs_pointer(file):
            raise TokenizerError(f"{file} is a Git LFS pointer, not the file; fetch it with `git lfs pull`") from error
        raise TokenizerError(
            f"{file} cannot be read ({len(content)} bytes): {error}; expected a file written by the Hugging "
            f"Face tokenizers library, version {tokenizers.__version__} or older"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; empty if there is no such file."""
    return read_object(file, TokenizerError) or {}


def _special_tokens(config: Mapping[str, Any], mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Named special tokens as plain strings.

    Precedence, as in transformers: a configuration that lists its added tokens, then `special_tokens_map.json`, then an
    older configuration that does not list them.
    """
    ordered = (mapping, config) if "added_tokens_decoder" in config else (config, mapping)
    tokens: dict[str, Any] = {}
    for source in ordered:
        for name in source:
            if (name in _NAMED or name.endswith("_token")) and (text := _content(source[name])):
                tokens[name] = text
        extra = source.get("additional_special_tokens")
        if isinstance(extra, list):
            tokens["additional_special_tokens"] = [text for text in map(_content, extra) if text]
    return tokens


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_tokens(raw: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Add tokens from `added_tokens_decoder` that tokenizer.json lacks or has with other flags."""
    known = raw.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    for index in listed:
        if index.isdecimal() and (len(index) > _LARGEST_DIGITS or int(index) > _LARGEST_ID):
            raise TokenizerError(
                f"{path / 'tokenizer_config.json'}: added_tokens_decoder has the id {index[:40]}: expected a token's id"
            )
    entries = ((int(index), entry) for index, entry in listed.items() if index.isdecimal() and _content(entry))
    for index, entry in sorted(entries, key=lambda item: item[0]):
        flags = {
            key: bool(entry[key])
            for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if key in entry
        }
        token = tokenizers.AddedToken(_content(entry), **flags)
        if repr(known.get(index)) == repr(token):
            continue
        raw.add_tokens([token])
        if raw.token_to_id(token.content) != index:
            logger.warning(
                "%s: tokenizer_config.json gives %r the id %d, and its id is %s",
                path, token.content, index, raw.token_to_id(token.content),
            )  # fmt: skip


def _mark_special(raw: tokenizers.Tokenizer, tokens: Mapping[str, Any]) -> None:
    """Mark the named tokens that the vocabulary has as special.

    The others are not added: the model has no embedding for them.
    """
    known = raw.get_added_tokens_decoder()
    named = [*(tokens[name] for name in _NAMED if name in tokens), *tokens.get("additional_special_tokens", ())]
    for text in named:
        id_ = raw.token_to_id(text)
        if id_ is not None and id_ not in known:
            raw.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _set_affixes(raw: tokenizers.Tokenizer, config: Mapping[str, Any], tokens: Mapping[str, Any]) -> None:
    """Make encoding add BOS and EOS if `add_bos_token` and `add_eos_token` say so."""
    bos, eos = tokens.get("bos_token"), tokens.get("eos_token")
    plain, full = raw.encode("a", add_special_tokens=False).ids, raw.encode("a").ids
    has_bos = bos is not None and full[:1] == [raw.token_to_id(bos)] != plain[:1]
    has_eos = eos is not None and full[-1:] == [raw.token_to_id(eos)] != plain[-1:]
    wants_bos, wants_eos = config.get("add_bos_token"), config.get("add_eos_token")
    want_bos = wants_bos if isinstance(wants_bos, bool) and raw.token_to_id(bos or "") is not None else has_bos
    want_eos = wants_eos if isinstance(wants_eos, bool) and raw.token_to_id(eos or "") is not None else has_eos
    if (want_bos, want_eos) == (has_bos, has_eos):
        return
    tokenizer_formats.add_affixes(raw, [bos] if bos and want_bos else [], [eos] if eos and want_eos else [])


def _ids(configs: Iterable[Mapping[str, Any]], key: str) -> list[int]:
    """Token ids for `key` in any of `configs`, given as a number or a list of numbers."""
    found: list[int] = []
    for config in configs:
        value = config.get(key)
        for id_ in value if isinstance(value, list) else [value]:
            if isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0:
                if id_ > _LARGEST_ID:
                    raise TokenizerError(f"{key} of the model's configuration is {_shown(id_)}: expected a token's id")
                found.append(id_)
    return found


def _shown(number: int) -> str:
    return "larger than any id" if number.bit_length() > 256 else str(number)


def _longest_token(raw: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> int | None:
    """Characters of the longest token, if every character of a text becomes a token or a part of one; else None.

    A byte of UTF-8 is at least one character of a byte-level token, so a token's own length bounds the text it encodes.
    There is no bound if characters may vanish or share a token: unknown characters without byte fallback, characters
    that a normaliser removes, blanks beside a token that strips them.
    """
    model, pre_tokenizer, normalizer = raw.model, _state(raw.pre_tokenizer), _state(raw.normalizer)
    if not isinstance(model, tokenizers.models.BPE):
        return None
    byte_level = any(part.get("type") == "ByteLevel" for part in pre_tokenizer.get("pretokenizers", [pre_tokenizer]))
    if byte_level:
        needed: Iterable[str] = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        needed = (f"<0x{byte:02X}>" for byte in range(256))
    bytewise = (byte_level or model.byte_fallback) and vocabulary.keys() >= set(needed)
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    strips = any(token.lstrip or token.rstrip for token in raw.get_added_tokens_decoder().values())
    if not bytewise or strips or not all(map(_keeps_length, steps)):
        return None
    return max(map(len, vocabulary))


def _state(component: Any) -> dict[str, Any]:
    """A pre-tokenizer or normalizer as tokenizer.json describes it."""
    return {} if component is None else json.loads(component.__getstate__())


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    if normalizer.get("type") == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"]) >= len(pattern)
    return normalizer.get("type") in ("Prepend", "ByteLevel")


def _reason(text: Any, error: Exception) -> str:
    if not isinstance(text, str):
        return f"expected text, got {type(text).__name__}"
    for position, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            return f"lone surrogate \\u{ord(character):04x} at position {position}"
    return str(error)

from __future__ import annotations

import base64
import functools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jinja2
import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Regex, Tokenizer as RawTokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from djl_trtllm.errors import InvalidRequestError, PromptTooLongError, TokenizerError
from djl_trtllm.model import Layout, Tokenizer, TokenTexts, inspect, load_tokenizer, tokenizer_formats
from djl_trtllm.model.tokenizer import load_fitting_tokenizer, outside, require_tokenizer, vocabulary_difference
from tests.model.conftest import CHATML, MakeModel, byte_level
from tests.model.test_layout import safetensors
from tests.support.tables import by_rows, by_table

USER = [{"role": "user", "content": "the wolf"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model")
    byte_level().save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


def test_using_a_tokenizer_imports_no_large_library_and_leaves_no_threads(make_model: MakeModel) -> None:
    path = make_model(**{"chat_template.jinja": CHATML, "config.json": {"model_type": "llama", "eos_token_id": 1}})
    program = f"""
import os, sys
from pathlib import Path
from djl_trtllm.model import load_tokenizer
tokenizer = load_tokenizer(Path({str(path)!r}))
assert tokenizer.decode(tokenizer.encode("the wolf")) == "the wolf"
assert tokenizer.render_chat([{{"role": "user", "content": "hi"}}])
tokenizer.encode("the wolf " * 1000)
print([name for name in ("torch", "transformers", "tensorflow", "numpy") if name in sys.modules])
print(len(os.listdir("/proc/self/task")))
"""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == ["[]", "1"], done.stderr


class Calls:
    """A tokenizer that notes what is called."""

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        self.raw = raw
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(self.raw, name)


def test_a_text_is_encoded_by_the_call_that_releases_the_gil(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, call = "the wolf and the girl. " * 60, "encode_batch_fast"
    calls = Calls(tokenizer.raw)
    monkeypatch.setattr(tokenizer, "raw", calls)
    for special in (True, False):
        assert tokenizer.encode(text, special) == calls.raw.encode(text, add_special_tokens=special).ids
    assert calls.names == [call, call]
    with pytest.raises(InvalidRequestError, match=rf"lone surrogate \\ud800 at position {len(text)}"):
        tokenizer.encode(text + "\ud800")
    with pytest.raises(InvalidRequestError, match="expected text, got int"):
        tokenizer.encode(3)  # type: ignore[arg-type]
    monkeypatch.setattr(tokenizer, "raw", Mock(**{f"{call}.side_effect": PanicException("called `unwrap()`")}))
    with pytest.raises(InvalidRequestError, match="the model's tokenizer fails on this text"):
        tokenizer.encode(text)
    assert [type(each) for each in tokenizer.encode_all([text, text])] == [InvalidRequestError] * 2


class PanicException(BaseException):
    """What a library in Rust raises when it panics has this name and is no `Exception`."""


normalizers = tokenizers.normalizers


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "bounded"),
    [
        (None, pre_tokenizers.Whitespace(), False),
        (normalizers.NFKC(), None, False),
        (normalizers.Replace("  ", " "), None, False),
        (normalizers.Replace(Regex(" +"), " "), None, False),
        (normalizers.Replace(" ", "_"), None, True),
        (normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")]), None, True),
        (normalizers.Sequence([normalizers.Prepend("_"), normalizers.NFKC()]), None, False),
    ],
)
def test_a_token_has_a_bound_unless_characters_may_vanish(
    make_model: MakeModel, normalizer: Any, pre_tokenizer: Any, bounded: bool
) -> None:
    path, raw = make_model(), byte_level()
    longest = max(map(len, raw.get_vocab()))
    if normalizer is not None:
        raw.normalizer = normalizer
    if pre_tokenizer is not None:
        raw.pre_tokenizer = pre_tokenizer
    raw.save(str(path / "tokenizer.json"))
    assert load_tokenizer(path).longest_token == (longest if bounded else None)
    raw.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True, special=True)])
    raw.save(str(path / "tokenizer.json"))
    assert load_tokenizer(path).longest_token is None


@pytest.mark.parametrize("missing", [None, 0, 255])
def test_bytes_to_fall_back_to_are_a_bound_where_all_are_there(tmp_path: Path, missing: int | None) -> None:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256) if byte != missing), "a", "wolf"]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).longest_token == (None if missing is not None else 6)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_a_round_trip_also_streamed(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)
    if not set(ids) & tokenizer.special_ids:
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [0, *ids]
    assert tokenizer.longest_token is not None and len(ids) * tokenizer.longest_token >= len(text)
    stream = DecodeStream(skip_special_tokens=True)
    assert "".join(stream.step(tokenizer.raw, id_) or "" for id_ in ids) == tokenizer.decode(ids)


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s>the wolf</s>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the wolf"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>the wolf</s>"
    assert tokenizer.special_ids == {0, 1, 2, 3}


@by_table("files", "expected", apart=True)
def test_every_file_that_names_an_end_token_counts(
    make_model: MakeModel, files: dict[str, Any], expected: list[int]
) -> None:
    assert load_tokenizer(make_model(**files)).end_ids == set(expected)


@by_table("files", "bos", "pad", "special", apart=True)
def test_named_tokens_come_from_the_tokenizer_or_else_the_models_config(
    make_model: MakeModel, files: dict[str, Any], bos: int | None, pad: int | None, special: str
) -> None:
    tokenizer = load_tokenizer(make_model(**files))
    assert (tokenizer.bos_id, tokenizer.pad_id) == (bos, pad)
    named = {tokenizer.raw.token_to_id(special)} if special else set()
    assert tokenizer.special_ids == {0, 1, 2, 3} | named
    assert tokenizer.vocab_size == byte_level().get_vocab_size()


@by_table("config", apart=True)
def test_entries_of_another_type_are_passed_over(make_model: MakeModel, config: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(make_model(**{"tokenizer_config.json": config}))
    assert tokenizer.end_ids == frozenset()


def test_listed_added_tokens_are_added_and_marked_special(make_model: MakeModel) -> None:
    size = byte_level().get_vocab_size()
    added = {str(size): {"content": "<|im_end|>", "special": True, "normalized": False}}
    config = {"added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    tokenizer = load_tokenizer(make_model(**{"tokenizer_config.json": config}))
    assert tokenizer.end_ids == {size} and size in tokenizer.special_ids
    assert tokenizer.encode("a<|im_end|>")[-1] == size
    assert tokenizer.vocab_size == size + 1


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip", "normalized", "special"])
def test_an_added_token_has_the_flags_that_are_listed(make_model: MakeModel, flag: str) -> None:
    size = byte_level().get_vocab_size()
    for value in (True, False):
        listed = {str(size): {"content": "<|im_end|>", flag: value}}
        tokenizer = load_tokenizer(make_model(**{"tokenizer_config.json": {"added_tokens_decoder": listed}}))
        assert getattr(tokenizer.raw.get_added_tokens_decoder()[size], flag) is value


@by_table("config", "expected", apart=True)
def test_bos_and_eos_are_added_as_transformers_adds_them(
    make_model: MakeModel, config: dict[str, Any], expected: list[Any]
) -> None:
    path = make_model(**{"tokenizer_config.json": {**config, "bos_token": "<s>", "eos_token": "</s>"}})
    tokenizer = load_tokenizer(path)
    plain = tokenizer.encode("the wolf", add_special_tokens=False)
    wanted = [id_ for item in expected for id_ in (plain if item == "…" else [item])]
    assert tokenizer.encode("the wolf") == wanted
    assert tokenizer.encode_all(["the wolf"]) == [wanted]
    assert tokenizer.encode_all(["the wolf"] * 128 + ["the"], False)[126:] == [plain, plain, plain[:-1]]


def test_a_tokenizer_from_another_process_has_its_template_compiled_when_it_renders(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TokenizerError, match="not valid Jinja"):
        load_tokenizer(make_model(**{"tokenizer_config.json": {"chat_template": "{% if %}"}}))
    data = pickle.dumps(load_tokenizer(make_model(**{"tokenizer_config.json": {"chat_template": CHATML}})))
    compiled: list[str] = []
    compiling = jinja2.Environment.from_string

    def counted(self: jinja2.Environment, source: str, *others: Any) -> jinja2.Template:
        compiled.append(source)
        return compiling(self, source, *others)

    monkeypatch.setattr(jinja2.Environment, "from_string", counted)
    tokenizer = pickle.loads(data)
    assert tokenizer.chat_source() == CHATML and compiled == []
    assert tokenizer.render_chat(USER) and compiled == [CHATML]


def test_a_chat_template_that_emits_bos_does_not_get_a_second(tokenizer: Tokenizer, make_model: MakeModel) -> None:
    with pytest.raises(InvalidRequestError, match=r"has no chat template.*chat_template\.jinja"):
        tokenizer.render_chat(USER)
    tokenizer = load_tokenizer(make_model(**{"tokenizer_config.json": {"chat_template": CHATML, "bos_token": "<s>"}}))
    ids = tokenizer.encode(tokenizer.render_chat(USER), add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>user: the wolf<|end|><s>assistant: "
    assert tokenizer.render_chat(USER, add_generation_prompt=False) == "<s>user: the wolf<|end|>"


def test_a_directory_without_tokenizer_files_lists_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(TokenizerError, match=r"found model\.safetensors; expected tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="not a directory"):
        load_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read \(1 bytes\)"),
        ("tokenizer.json", "[" * 4_000_001, r"tokenizer\.json cannot be read .* more than 4,000,000 values"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
        ("generation_config.json", "{", r"generation_config\.json is not valid JSON"),
        ("special_tokens_map.json", "{", r"special_tokens_map\.json is not valid JSON"),
        ("config.json", f'{{"eos_token_id": {"9" * 5000}}}', "is not valid JSON"),
        ("config.json", {"eos_token_id": [2, 2**31]}, "eos_token_id .* is 2147483648: expected a token's id"),
        ("generation_config.json", {"eos_token_id": int("9" * 4000)}, "eos_token_id is 9+, expected at most"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"4294967296": {"content": "<x>"}}},
            "has the id 4294967296:",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}}, "has the id 9{40}:"),
    ],
)
def test_a_damaged_file_is_named(make_model: MakeModel, name: str, content: Any, says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        load_tokenizer(make_model(**{name: content}))


def test_truncation_and_padding_saved_with_a_tokenizer_are_off(make_model: MakeModel) -> None:
    path, saved = make_model(), byte_level()
    saved.enable_truncation(4)
    saved.enable_padding(length=16)
    saved.save(str(path / "tokenizer.json"))
    assert load_tokenizer(path).encode("the wolf") == byte_level().encode("the wolf").ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_ids_and_chats_equal_those_of_transformers(
    kind: str, make_model: MakeModel, tmp_path: Path, sentencepiece_file: Callable[..., Path]
) -> None:
    transformers = pytest.importorskip("transformers")
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {"chat_template": CHATML, "clean_up_tokenization_spaces": False}
    if kind == "byte-level":
        path = make_model(**{"tokenizer_config.json": {**config, "tokenizer_class": "PreTrainedTokenizerFast"}})
        theirs = transformers.AutoTokenizer.from_pretrained(path)
    else:
        path = make_model(**{"tokenizer_config.json": config, "config.json": {"model_type": "llama"}})
        (path / "tokenizer.json").unlink()
        (path / "tokenizer.model").write_bytes(sentencepiece_file().read_bytes())
        theirs = transformers.AutoTokenizer.from_pretrained(path)
    ours = load_tokenizer(path)
    texts = ["", "the wolf", "Grüße 你好 🙂\n\t don't", "1234567 a.b"]
    for text in texts:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    text = theirs.apply_chat_template(USER, add_generation_prompt=True, tokenize=False)
    assert ours.render_chat(USER) == text
    assert text == "<s>user: the wolf<|end|><s>assistant: "


@pytest.mark.parametrize("length", [40, 2000])
def test_a_regular_expression_without_end_ends_the_request(length: int) -> None:
    raw = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    # This expression takes more steps than there may be on a row of letters.
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"^(a+)+$(?<!b)|(a|aa)+$"), "isolated")
    catastrophic = Tokenizer(raw, special_tokens={}, end_ids=(), templates={}, origin=Path("here"))
    with pytest.raises(InvalidRequestError, match="the model's tokenizer fails on this text"):
        catastrophic.encode("a" * length + "b")
    assert catastrophic.encode("b") == [1]


def test_more_tokens_than_there_may_be_are_counted_and_not_listed(tokenizer: Tokenizer) -> None:
    text = "the wolf " * 1000
    count = len(tokenizer.encode(text))
    assert len(tokenizer.encode(text, most=count)) == count
    with pytest.raises(PromptTooLongError, match=f"the prompt has {count} tokens, and max_input_len is {count - 1}"):
        tokenizer.encode(text, most=count - 1)


def model(path: Path, vocab_size: int | None, tokenizer: tokenizers.Tokenizer | None) -> Layout:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size}
    (path / "config.json").write_text(json.dumps(config))
    safetensors(path / "model.safetensors")
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    return inspect(path)


def test_a_model_without_a_tokenizer_is_refused_unless_it_may_be_in_the_engine_inside(tmp_path: Path) -> None:
    layout = model(tmp_path, 400, None)
    with pytest.raises(TokenizerError, match=r"found config\.json, model\.safetensors; expected .*option\.tokenizer"):
        load_fitting_tokenizer(layout, trust_remote_code=False)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "openvino_model.xml").touch()
    layout = model(tmp_path, 400, None)
    require_tokenizer(layout)
    assert load_fitting_tokenizer(layout, trust_remote_code=False) is None


@pytest.mark.parametrize("added", [[], ["<image>"]])
def test_ids_may_be_beyond_the_models_only_where_no_text_has_them(tmp_path: Path, added: list[str]) -> None:
    tokenizer = byte_level()
    known = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(added)
    for size in (None, known, known + 100):
        layout = model(tmp_path, size, tokenizer)
        loaded = load_fitting_tokenizer(layout, trust_remote_code=False)
        assert loaded is not None and outside(loaded, layout) == (known if added and size == known else None)
    with pytest.raises(
        TokenizerError, match=rf"has ids up to {known - 1}, .* up to {known - 2} \(vocab_size {known - 1}"
    ):
        load_fitting_tokenizer(model(tmp_path, known - 1, tokenizer), trust_remote_code=False)
    tokenizer.add_special_tokens(["<start>"])
    start = tokenizer.token_to_id("<start>")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", start)]
    )
    with pytest.raises(TokenizerError, match=rf"has the id {start} in every prompt"):
        load_fitting_tokenizer(model(tmp_path, known, tokenizer), trust_remote_code=False)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["a", "▁", "▁wolf", "wolf", "##s", "\ufffd", "é"]
REPLACE, STRIP = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)


def test_a_draft_has_the_ids_of_the_model_or_at_least_as_many(tmp_path: Path) -> None:
    def of(name: str, *tokens: str, size: int | None = None) -> Layout:
        words = models.WordLevel({token: id_ for id_, token in enumerate(tokens)}, unk_token="a")
        (tmp_path / name).mkdir()
        return model(tmp_path / name, size, RawTokenizer(words) if tokens else None)

    target = of("target", "a", "b", "c", size=3)
    assert vocabulary_difference(target, of("same", "a", "b", "c")) == ""
    assert vocabulary_difference(target, of("other", "a", "c", "b")) == "token 'c' is 1 there, and 2 in the model"
    assert vocabulary_difference(target, of("fewer", "a", "b")) == "token 'c' is missing there, and 2 in the model"
    assert vocabulary_difference(of("small", "a"), target) == "token 'b' is 1 there, and missing in the model"
    sizes = {3: "", 4: "it has 4 tokens, and the model 3", None: ""}
    for size, difference in sizes.items():
        assert vocabulary_difference(target, of(f"sized-{size}", size=size)) == difference


def raw_tokenizer(decoder: Any, *pieces: str) -> RawTokenizer:
    """A tokenizer whose ids are bytes and then pieces."""
    vocabulary = {piece: id_ for id_, piece in enumerate([*BYTES, *pieces])}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token=pieces[0]))
    if decoder is not None:
        raw.decoder = decoder
    return raw


def known(decoder: Any, *pieces: str) -> dict[str, str]:
    """The texts that are known, by piece."""
    texts = TokenTexts(raw_tokenizer(decoder, *(pieces or PIECES)))
    assert [texts[id_] for id_ in range(256)] == [None] * 256  # a byte may be a part of a character
    found = {piece: texts[texts.raw.token_to_id(piece)] for piece in pieces or PIECES}
    return {piece: text for piece, text in found.items() if text is not None}


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse(), STRIP]),
        decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse()]),
    ],
)
def test_pieces_have_their_text_after_the_first_token(decoder: Any) -> None:
    assert known(decoder) == {"a": "a", "▁": " ", "▁wolf": " wolf", "wolf": "wolf", "##s": "##s", "é": "é"}


@by_rows(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.ByteFallback(),
        decoders.Sequence([REPLACE, decoders.ByteFallback()]),
        decoders.Sequence([decoders.Fuse(), REPLACE]),
        decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.Fuse()]),
        decoders.Sequence([STRIP, decoders.Fuse()]),
        decoders.Sequence([REPLACE, decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.WordPiece(), decoders.Fuse()]),
    ],
)
def test_nothing_is_known_of_other_decoders(decoder: Any) -> None:
    assert known(decoder) == {}
    assert known(decoders.Metaspace(), "b", "▁wolf") == {}  # there is no "a" to begin with


def test_of_byte_level_tokens_whole_characters_are_known(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer.raw)
    (word,) = tokenizer.encode(" the", False)
    assert word not in texts and texts[word] == texts.get(word) == " the"
    unknown = [*tokenizer.encode("😀", False), *tokenizer.special_ids, tokenizer.vocab_size + 1]
    assert [texts[id_] for id_ in unknown] == [None] * len(unknown)


# -- formats of tokenizers ---------------------------------------------------------------------------------------------


OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_dummy_prefix": False},
    {"model_type": "unigram"},
    {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    {"byte_fallback": False},
    {"user_defined_symbols": ["<|im_start|>"]},
]


def load(file: Path, into: Path, **config: Any) -> Tokenizer:
    (into / "tokenizer.model").write_bytes(file.read_bytes())
    (into / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(into)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ids_equal_those_of_sentencepiece(
    options: dict[str, Any], tmp_path: Path, sentencepiece_file: Callable[..., Path]
) -> None:
    file = sentencepiece_file(**options)
    tokenizer = load(file, tmp_path)
    reference = sentencepiece.SentencePieceProcessor(str(file))
    assert tokenizer.vocab_size == reference.get_piece_size()
    ids = (tokenizer.bos_id, tokenizer.end_ids, tokenizer.pad_id)
    assert ids == (reference.bos_id(), frozenset({reference.eos_id()}), None)
    for text in ["the wolf", "  two  spaces ", "Grüße 你好 🙂\n\tx", "", "wolf\n\nwood  ", "Ⅳ ﬁn"]:
        assert tokenizer.encode(text) == [reference.bos_id(), *reference.encode(text)], text
        if reference.unk_id() not in tokenizer.encode(text):  # an unknown token is special here, and " ⁇ " there
            assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(reference.encode(text))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁")))
def test_any_text_survives_a_round_trip(text: str, sentencepiece_file: Callable[..., Path]) -> None:
    file = sentencepiece_file()
    tokenizer, _ = _read(file)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert ids == sentencepiece.SentencePieceProcessor(str(file)).encode(text)


@functools.cache
def _read(file: Path) -> Any:
    return tokenizer_formats.read(file, {})


def test_special_tokens_are_set_off_as_the_configuration_says(
    tmp_path: Path, sentencepiece_file: Callable[..., Path]
) -> None:
    file = sentencepiece_file(user_defined_symbols=["<|im_start|>"])
    for config, shown in (({}, "<s> the</s> wolf"), ({"legacy": False}, "<s> the</s>wolf")):
        tokenizer = load(file, tmp_path, **config)
        assert tokenizer.decode(tokenizer.encode("the</s>wolf"), skip_special_tokens=False) == shown
    id_ = sentencepiece.SentencePieceProcessor(str(file)).piece_to_id("<|im_start|>")
    ids = tokenizer.encode("the wolf<|im_start|>")
    assert ids[-1] == id_ and id_ not in tokenizer.special_ids
    assert tokenizer.decode(ids) == "the wolf<|im_start|>"
    tokenizer = load(file, tmp_path, add_bos_token=False, add_eos_token=True)
    assert tokenizer.encode("the wolf") == [*tokenizer.encode("the wolf", add_special_tokens=False), 2]


@pytest.mark.parametrize("content", [b"", b"garbage", b"version https://git-lfs.github.com/spec/v1\noid sha256:1"])
def test_a_damaged_model_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    remedy = "git lfs pull" if content.startswith(b"version") else "copy it again"
    with pytest.raises(TokenizerError, match=rf"tokenizer\.model \(\d+ bytes\) is not a SentencePiece model.*{remedy}"):
        load_tokenizer(tmp_path)


def test_qwen_1_is_read_without_its_code(tmp_path: Path) -> None:
    ranked = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"lo", b"hell", b"hello", b" hello", "é".encode()]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranked)]
    (tmp_path / "qwen.tiktoken").write_bytes(b"".join(lines))
    config = {"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    # A word at a time, in it the pair of the lowest rank first; composed characters; special tokens behind the others.
    assert tokenizer.encode("hello hello1e\u0301<|im_start|>") == [260, 261, ord("1"), 262, 264]
    assert tokenizer.encode("hellol\n") == [260, ord("l"), ord("\n")]
    assert tokenizer.end_ids == {263} and tokenizer.vocab_size == 263 + 208
    for wrong in (b"aGU= 1\n*** 2\n", b"aGU= -1\n", b"aGU= %d\n" % 2**24):
        (tmp_path / "qwen.tiktoken").write_bytes(wrong)
        with pytest.raises(TokenizerError, match=r"qwen\.tiktoken is not a tiktoken file"):
            load_tokenizer(tmp_path)
    (tmp_path / "qwen.tiktoken").write_bytes(bytes(2**26 + 1))
    with pytest.raises(TokenizerError, match=r"qwen\.tiktoken cannot be read: it has more than 67,108,864 bytes"):
        load_tokenizer(tmp_path)


def test_a_conversion_that_disagrees_is_refused(sentencepiece_file: Callable[..., Path]) -> None:
    raw, _ = tokenizer_formats.read(sentencepiece_file(), {})
    with pytest.raises(TokenizerError, match="cannot be converted: 'wolf' is"):
        tokenizer_formats.check(raw, [("wolf", [1, 2, 3])], Path("tokenizer.model"))


REMOTE = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
# The shape of InternLM's and Baichuan's: Python code around a SentencePiece model.
CODE = """
from pathlib import Path
import sentencepiece
from transformers import PreTrainedTokenizer

Path(__file__).with_name("was_run").touch()

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tokenizer.model"}

    def __init__(self, vocab_file, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **kwargs):
        self.sp = sentencepiece.SentencePieceProcessor()
        self.sp.Load(vocab_file)
        super().__init__(unk_token=unk_token, bos_token=bos_token, eos_token=eos_token, **kwargs)

    @property
    def vocab_size(self):
        return self.sp.get_piece_size()

    def get_vocab(self):
        return {self.sp.id_to_piece(i): i for i in range(self.vocab_size)}

    def _tokenize(self, text, **kwargs):
        return self.sp.encode(OFFSET + text, out_type=str)

    def _convert_token_to_id(self, token):
        return self.sp.piece_to_id(token)

    def _convert_id_to_token(self, index):
        return self.sp.id_to_piece(index)

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return [self.bos_token_id] + token_ids_0

    def save_vocabulary(self, *args, **kwargs):
        return ()
"""


@pytest.fixture
def remote(tmp_path: Path, sentencepiece_file: Callable[..., Path]) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file().read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(REMOTE))
    (tmp_path / "tokenization_own.py").write_text(CODE.replace("OFFSET", "''"))
    return tmp_path


@pytest.fixture(autouse=True)
def _own_module_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
    monkeypatch.delenv("HF_MODULES_CACHE", raising=False)


def test_code_of_the_model_is_not_run_unless_trusted(remote: Path) -> None:
    with pytest.raises(TokenizerError, match=r"OwnTokenizer.*option\.trust_remote_code=true"):
        load_tokenizer(remote)


# What is asked of transformers, by a module of its name that loads at once.
TRANSFORMERS = """
import os
from pathlib import Path
import tokenizers

class AutoTokenizer:
    bos_token_id, eos_token_id = 0, 1
    special_tokens_map = {"eos_token": "</s>", "pad_token": "", "additional_special_tokens": ["<|end|>"]}

    @classmethod
    def from_pretrained(cls, source, trust_remote_code):
        made = cls()
        made.raw = tokenizers.Tokenizer.from_file(f"{source}/kept.json")
        offline, parallel = os.environ.get("HF_HUB_OFFLINE") == "1", os.environ["TOKENIZERS_PARALLELISM"]
        if offline is trust_remote_code or parallel != "false":
            raise ValueError("code of another repository is fetched where it is trusted, and else nothing")
        if trust_remote_code is not Path(source, "tokenizer.model").exists():
            raise ValueError(f"trust_remote_code is {trust_remote_code}")
        if not trust_remote_code:
            made.backend_tokenizer = made.raw
        return made

    def encode(self, text, add_special_tokens=True):
        return self.raw.encode(text, add_special_tokens=add_special_tokens).ids
"""


@pytest.fixture
def transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    byte_level().save(str(tmp_path / "kept.json"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.usefixtures("transformers")
def test_a_converted_tokenizer_has_its_ids_end_and_affixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "json.py").write_text("raise RuntimeError('a module of the working directory')")
    monkeypatch.chdir(tmp_path / "here")
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the wolf") == byte_level().encode("the wolf").ids
    assert tokenizer.end_ids == {1} and tokenizer.pad_id is None


@pytest.mark.usefixtures("transformers")
def test_python_code_alone_or_with_other_ids_than_its_sentencepiece_model_is_refused(remote: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot be converted"):
        load_tokenizer(remote, trust_remote_code=True)


@pytest.mark.slow
def test_trusted_code_around_a_sentencepiece_model_is_replaced_by_that_model(remote: Path) -> None:
    tokenizer = load_tokenizer(remote, trust_remote_code=True)
    assert tokenizer.encode("the wolf")[0] == tokenizer.bos_id == 1
    assert tokenizer.decode(tokenizer.encode("the wolf")) == "the wolf"
    assert tokenizer.end_ids == {2}
    (remote / "tokenization_own.py").write_text(CODE.replace("OFFSET", "'wolf '"))
    with pytest.raises(TokenizerError, match="cannot be converted"):
        load_tokenizer(remote, trust_remote_code=True)


@pytest.mark.slow
def test_vocabulary_and_merges_are_converted(tmp_path: Path) -> None:
    original = byte_level()
    original.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokens = {"unk_token": "<s>", "bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "GPT2Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    tokenizer = load_tokenizer(tmp_path)
    text = "the wolf Grüße 你好 🙂"
    assert tokenizer.encode(text, add_special_tokens=False) == original.encode(text, add_special_tokens=False).ids
    assert tokenizer.end_ids == {1}


@pytest.mark.slow
def test_a_failed_conversion_shows_its_last_lines_and_is_bounded_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (("vocab.json", "{"), ("merges.txt", ""), ("config.json", '{"model_type": "gpt2"}')):
        (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=r"could not be converted[\s\S]*  \| .*Error"):
        load_tokenizer(tmp_path)
    monkeypatch.setattr(tokenizer_formats, "TIMEOUT", 0.05)
    with pytest.raises(TokenizerError, match="took longer than"):
        load_tokenizer(tmp_path)

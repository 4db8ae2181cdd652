from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from djl_trtllm.errors import InvalidRequestError, TokenizerError
from djl_trtllm.model import Tokenizer, load_tokenizer
from tests.model.conftest import CHATML, MakeModel, byte_level

USER = [{"role": "user", "content": "the wolf"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model")
    byte_level().save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


def test_loading_and_using_a_tokenizer_imports_neither_torch_nor_transformers(make_model: MakeModel) -> None:
    path = make_model(**{"chat_template.jinja": CHATML, "config.json": {"model_type": "llama", "eos_token_id": 1}})
    program = f"""
import sys
from pathlib import Path
from djl_trtllm.model import load_tokenizer
tokenizer = load_tokenizer(Path({str(path)!r}))
assert tokenizer.decode(tokenizer.encode("the wolf")) == "the wolf"
assert tokenizer.render_chat([{{"role": "user", "content": "hi"}}])
print([name for name in ("torch", "transformers", "tensorflow") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=_environment()
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_importing_the_package_imports_no_large_library() -> None:
    program = "import djl_trtllm.model, sys; print([n for n in ('torch', 'transformers', 'numpy') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=_environment()
    )
    assert done.stdout.strip() == "[]", done.stderr


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""}


def test_a_long_text_takes_no_threads_that_stay(make_model: MakeModel) -> None:
    program = f"""
import os
from pathlib import Path
from djl_trtllm.model import load_tokenizer
load_tokenizer(Path({str(make_model())!r})).encode("the wolf " * 1000)
print(len(os.listdir("/proc/self/task")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=_environment()
    )
    assert done.stdout.strip() == "1", done.stderr


class Calls:
    """A tokenizer that notes what is called."""

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        self.raw = raw
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(self.raw, name)


@pytest.mark.parametrize(("length", "call"), [(1024, "encode"), (1025, "encode_batch_fast")])
def test_a_long_text_is_encoded_by_the_call_that_releases_the_gil(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, length: int, call: str
) -> None:
    text = ("the wolf and the girl. " * 60)[:length]
    calls = Calls(tokenizer.raw)
    monkeypatch.setattr(tokenizer, "raw", calls)
    for special in (True, False):
        assert tokenizer.encode(text, special) == calls.raw.encode(text, add_special_tokens=special).ids
    assert calls.names == [call, call]
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        tokenizer.encode(text + "\ud800")


def test_the_longest_token_bounds_what_a_token_holds(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token == max(map(len, tokenizer.raw.get_vocab()))


def test_the_vocabulary_is_read_once_when_loading(tmp_path: Path) -> None:
    """Reading or writing one of 128,000 tokens takes a tenth of a second."""
    raw = Calls(byte_level())
    Tokenizer(raw, special_tokens={}, end_ids=(), templates={}, origin=tmp_path)
    assert raw.names.count("get_vocab") == 1
    assert not {"to_str", "save"} & {*raw.names}


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_no_text_has_fewer_tokens_than_the_bound_says(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.longest_token is not None
    assert len(tokenizer.encode(text, False)) * tokenizer.longest_token >= len(text)


def _stripping(raw: tokenizers.Tokenizer) -> None:
    raw.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True, special=True)])


def _normalized(normalizer: Any) -> Callable[[tokenizers.Tokenizer], None]:
    def change(raw: tokenizers.Tokenizer) -> None:
        raw.normalizer = normalizer

    return change


def _without_bytes(raw: tokenizers.Tokenizer) -> None:
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()


@pytest.mark.parametrize(
    ("change", "bounded"),
    [
        (_stripping, False),
        (_without_bytes, False),
        (_normalized(tokenizers.normalizers.NFKC()), False),
        (_normalized(tokenizers.normalizers.Replace("  ", " ")), False),
        (_normalized(tokenizers.normalizers.Replace(tokenizers.Regex(" +"), " ")), False),
        (_normalized(tokenizers.normalizers.Replace(" ", "_")), True),
        (
            _normalized(
                tokenizers.normalizers.Sequence(
                    [tokenizers.normalizers.Prepend("_"), tokenizers.normalizers.Replace(" ", "_")]
                )
            ),
            True,
        ),
    ],
)
def test_there_is_no_bound_where_characters_may_vanish(
    change: Callable[[tokenizers.Tokenizer], None], bounded: bool, tmp_path: Path
) -> None:
    raw = byte_level()
    change(raw)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert (load_tokenizer(tmp_path).longest_token is not None) is bounded


@pytest.mark.parametrize("missing", [None, 0, 255])
def test_bytes_to_fall_back_to_are_a_bound_where_all_are_there(tmp_path: Path, missing: int | None) -> None:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256) if byte != missing), "a", "wolf"]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).longest_token == (None if missing is not None else 6)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)
    if not set(ids) & tokenizer.special_ids:
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [0, *ids]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_the_raw_tokenizer_streams_what_decode_gives_whole(tokenizer: Tokenizer, text: str) -> None:
    stream = DecodeStream(skip_special_tokens=True)
    ids = tokenizer.encode(text)
    streamed = "".join(stream.step(tokenizer.raw, id_) or "" for id_ in ids)
    assert streamed == tokenizer.decode(ids)


def test_a_lone_surrogate_is_the_requests_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate \\ud800 at position 4"):
        tokenizer.encode("wolf\ud800")
    with pytest.raises(InvalidRequestError, match="expected text, got int"):
        tokenizer.encode(3)  # type: ignore[arg-type]


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s>the wolf</s>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the wolf"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>the wolf</s>"
    assert tokenizer.special_ids == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, {1}),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>", "special": True}}}, {1}),
        ({"special_tokens_map.json": {"eos_token": "</s>"}}, {1}),
        ({"config.json": {"eos_token_id": 1}}, {1}),
        ({"config.json": {"text_config": {"eos_token_id": [1, 3]}}}, {1, 3}),
        ({"generation_config.json": {"eos_token_id": [3, 399]}, "config.json": {"eos_token_id": 1}}, {1, 3, 399}),
        ({"generation_config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": None}}, set()),
        ({"generation_config.json": {"eos_token_id": [3]}, "tokenizer_config.json": {"eos_token": "</s>"}}, {1, 3}),
    ],
)
def test_every_file_that_names_an_end_token_counts(
    make_model: MakeModel, files: dict[str, Any], expected: set[int]
) -> None:
    assert load_tokenizer(make_model(**files)).end_ids == expected


def test_named_ids_come_from_the_tokenizer_or_else_the_models_config(make_model: MakeModel) -> None:
    named = load_tokenizer(make_model(**{"tokenizer_config.json": {"bos_token": "<s>", "pad_token": "<pad>"}}))
    assert (named.bos_id, named.pad_id) == (0, 2)
    by_id = load_tokenizer(
        make_model(**{"tokenizer_config.json": {}, "config.json": {"bos_token_id": 0, "pad_token_id": 2}})
    )
    assert (by_id.bos_id, by_id.pad_id) == (0, 2)


def test_a_special_token_the_vocabulary_lacks_gets_no_new_id(make_model: MakeModel) -> None:
    # The model has no embedding for it.
    tokenizer = load_tokenizer(make_model(**{"tokenizer_config.json": {"pad_token": "[PAD]"}}))
    assert tokenizer.pad_id is None


def test_a_named_token_that_the_vocabulary_has_as_an_ordinary_one_becomes_special(make_model: MakeModel) -> None:
    tokenizer = load_tokenizer(make_model(**{"tokenizer_config.json": {"eos_token": "wolf"}}))
    (id_,) = tokenizer.end_ids
    assert id_ in tokenizer.special_ids
    assert tokenizer.vocab_size == byte_level().get_vocab_size()


def test_default_ids_of_the_models_config_do_not_make_ordinary_tokens_special(make_model: MakeModel) -> None:
    tokenizer = load_tokenizer(make_model(**{"config.json": {"pad_token_id": 20, "bos_token_id": 21}}))
    assert (tokenizer.pad_id, tokenizer.bos_id) == (None, None)
    assert tokenizer.special_ids == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {}, "7": "y", "8": {"content": 3}}, "chat_template": [{"name": "default"}, 4]},
        {"added_tokens_decoder": [], "chat_template": 3, "eos_token": 5, "additional_special_tokens": [None]},
    ],
)
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


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0, "…"]),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, ["…"]),
        ({"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}, [0, "…", 1]),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}, [0, "…"]),
    ],
)
def test_bos_and_eos_are_added_as_transformers_adds_them(
    make_model: MakeModel, config: dict[str, Any], expected: list[Any]
) -> None:
    path = make_model(**{"tokenizer_config.json": {**config, "bos_token": "<s>", "eos_token": "</s>"}})
    tokenizer = load_tokenizer(path)
    plain = tokenizer.encode("the wolf", add_special_tokens=False)
    wanted = [id_ for item in expected for id_ in (plain if item == "…" else [item])]
    assert tokenizer.encode("the wolf") == wanted


def test_a_chat_template_that_emits_bos_does_not_get_a_second(make_model: MakeModel) -> None:
    tokenizer = load_tokenizer(make_model(**{"tokenizer_config.json": {"chat_template": CHATML, "bos_token": "<s>"}}))
    ids = tokenizer.encode(tokenizer.render_chat(USER), add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>user: the wolf<|end|><s>assistant: "
    without = tokenizer.render_chat(USER, add_generation_prompt=False)
    without_ids = tokenizer.encode(without, add_special_tokens=False)
    assert without_ids == ids[: len(ids) - len(tokenizer.encode("assistant: "))]


def test_chat_without_a_template_is_the_requests_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"has no chat template.*chat_template\.jinja"):
        tokenizer.render_chat(USER)


def test_a_directory_without_tokenizer_files_lists_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(TokenizerError, match=r"found model\.safetensors; expected tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="not a directory"):
        load_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", r"tokenizer\.json cannot be read \(1 bytes\)"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_a_damaged_tokenizer_file_is_named(make_model: MakeModel, content: str, says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        load_tokenizer(make_model(**{"tokenizer.json": content}))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json"])
def test_a_damaged_configuration_file_is_named(make_model: MakeModel, name: str) -> None:
    with pytest.raises(TokenizerError, match=f"{name} is not valid JSON"):
        load_tokenizer(make_model(**{name: "{"}))


def test_truncation_and_padding_saved_with_a_tokenizer_are_off(make_model: MakeModel) -> None:
    path = make_model()
    saved = byte_level()
    saved.enable_truncation(4)
    saved.enable_padding(length=16)
    saved.save(str(path / "tokenizer.json"))
    assert len(load_tokenizer(path).encode("the wolf " * 10)) == len(byte_level().encode("the wolf " * 10).ids)


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

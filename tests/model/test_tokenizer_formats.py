from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djl_trtllm.errors import TokenizerError
from djl_trtllm.model import Tokenizer, load_tokenizer, tokenizer_formats
from tests.model.conftest import byte_level

sentencepiece = pytest.importorskip("sentencepiece")

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
    with pytest.raises(TokenizerError, match=r"tokenizer\.model \(\d+ bytes\) is not a SentencePiece model"):
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
    (tmp_path / "qwen.tiktoken").write_bytes(b"aGU= 1\n*** 2\n")
    with pytest.raises(TokenizerError, match=r"qwen\.tiktoken is no file of tiktoken"):
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
from pathlib import Path
import tokenizers

class AutoTokenizer:
    bos_token_id, eos_token_id = 0, 1
    special_tokens_map = {"eos_token": "</s>", "pad_token": "", "additional_special_tokens": ["<|end|>"]}

    @classmethod
    def from_pretrained(cls, source, trust_remote_code):
        made = cls()
        made.raw = tokenizers.Tokenizer.from_file(f"{source}/kept.json")
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

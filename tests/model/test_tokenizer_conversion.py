from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from djl_trtllm.errors import TokenizerError
from djl_trtllm.model import load_tokenizer, tokenizer_conversion
from tests.model.conftest import byte_level

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


@pytest.mark.slow
def test_trusted_code_around_a_sentencepiece_model_is_replaced_by_that_model(remote: Path) -> None:
    tokenizer = load_tokenizer(remote, trust_remote_code=True)
    assert tokenizer.encode("the wolf")[0] == tokenizer.bos_id == 1
    assert tokenizer.decode(tokenizer.encode("the wolf")) == "the wolf"
    assert tokenizer.end_ids == {2}


@pytest.mark.slow
def test_trusted_code_that_tokenizes_otherwise_is_refused(remote: Path) -> None:
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
def test_a_failed_conversion_shows_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(TokenizerError, match=r"could not be converted[\s\S]*  \| .*Error"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_a_conversion_is_bounded_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    monkeypatch.setattr(tokenizer_conversion, "TIMEOUT", 0.05)
    with pytest.raises(TokenizerError, match="took longer than"):
        load_tokenizer(tmp_path)

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.backends.tensorrt_llm.converter_aliases import converter_alias
from tests.config.helpers import from_text

_GLM3 = {"model_type": "chatglm", "padded_vocab_size": 65024}


@pytest.mark.parametrize(
    ("path", "raw", "options", "name"),
    [
        ("/opt/ml/model", _GLM3, "", "chatglm3"),
        ("/opt/ml/model", _GLM3 | {"padded_vocab_size": 151552}, "", "glm4"),
        ("/opt/ml/model", {"model_type": "chatglm", "inner_hidden_size": 16384}, "", "chatglm"),
        ("/hub/models--THUDM--chatglm2-6b/snapshots/1", _GLM3, "", "chatglm2"),
        ("/hub/glm-4-9b", _GLM3, "", "glm4"),
        ("/hub/chatglm2-6b", _GLM3, "option.chatglm_model_version=chatglm3_6b_32k", "chatglm3_6b_32k"),
        ("/opt/ml/model", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "", "gpt2"),
        ("/opt/ml/model", {"model_type": "gpt2", "architectures": ["GPT2LMHeadCustomModel"]}, "", "santacoder"),
        ("/opt/ml/model", {"model_type": "gpt_bigcode"}, "", "starcoder"),
        ("/hub/santacoder", {"model_type": "gpt_bigcode"}, "", "santacoder"),
        ("/opt/ml/model", {"model_type": "gpt_bigcode"}, "option.gpt_model_version=santacoder", "santacoder"),
        ("/hub/chatglm2-6b", {"model_type": "llama"}, "option.gpt_model_version=gpt2", None),
        ("/opt/ml/model", {}, "", None),
    ],
)
def test_versions_are_reported_by_option_path_and_configuration(
    path: str, raw: dict[str, object], options: str, name: str | None
) -> None:
    assert converter_alias(Path(path), raw, from_text(options)) == name

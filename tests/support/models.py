"""Model directories with known tokens, on a scripted executor; LoRA adapters as PEFT writes them, with zeros."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api.base import ResponseEncoder
from djl_trtllm.errors import RequestError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.fakes.installation import fake_tensorrt_llm

# -- executors as `Start` names them -----------------------------------------------------------------------------------

SCRIPTED = "djl_trtllm.backends.scripted.executor:ScriptedExecutor"
SCRIPTED_POOLING = "djl_trtllm.backends.scripted.executor:ScriptedPoolingExecutor"
OPENVINO = "djl_trtllm.backends.openvino.executor:OpenVinoExecutor"
TENSORRT_LLM = "djl_trtllm.backends.tensorrt_llm.executor:TensorRtLlmExecutor"


# -- chunks of a rolling batch, and an encoder whose bytes show what it was given --------------------------------------


def chunk(text: str = "", *, ends: bool = False, error: RequestError | None = None, index: int = 0) -> OutputChunk:
    """What is new in a sequence: a text, its end by length, its end by an error."""
    reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
    finished = SequenceResult(reason, 1, None, None, error=error) if ends or error is not None else None
    return OutputChunk(index, [Token(5, text, None, False)] if text else [], finished)


class WordEncoder(ResponseEncoder):
    """The texts, and `.` at the end; `!` is how an answer ends that cannot go on."""

    content_type = "text/words"

    def __init__(self, *, stream: bool = True, last: bytes = b"!") -> None:
        self.stream = stream
        self.failure: Exception | None = None
        self._last = last
        self._text = ""

    def encode(self, chunk: OutputChunk) -> bytes:
        if self.failure is not None:
            raise self.failure
        self._text += "".join(token.text for token in chunk.tokens)
        if chunk.finished is not None:
            self._text += "." if chunk.finished.error is None else "?"
        if not self.stream and chunk.finished is None:
            return b""
        text, self._text = self._text, ""
        return text.encode()

    def error(self, error: RequestError) -> bytes:
        assert isinstance(error, RequestError)
        return self._last


TINY_STORIES = Path(__file__).parents[2] / "serving" / "models" / "tiny-stories"
PROMPT = "the little red riding hood went into the dark wood to see her grandmother"

without_sagemakers_model = pytest.mark.skipif(
    Path("/opt/ml/model").exists(), reason="this machine has a model where SageMaker puts it, which comes first"
)


def scripted_model(directory: Path, script: Mapping[str, object] | None = None, /, **options: object) -> Path:
    """The bundled model's tokenizer in front of the scripted executor. `options` are `option.NAME`, or any key."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in TINY_STORIES.iterdir():
        if file.is_file() and file.name not in ("serving.properties", "config.json"):
            (directory / file.name).symlink_to(file)
    # Streams that are to outlast anything need more room than the model has.
    config = json.loads((TINY_STORIES / "config.json").read_text()) | {"max_position_embeddings": 5_000_000}
    (directory / "config.json").write_text(json.dumps(config))
    values = {
        "option.backend": "scripted",
        "option.script": json.dumps(script or {}),
        "option.max_rolling_batch_size": 32,
        "option.max_input_len": 4096,
        "option.max_output_len": 4_000_000,
        "option.max_seq_len": 4_100_000,
        "option.model_name": "scripted",
        **options,
    }
    lines = "".join(f"{key}={value}\n" for key, value in values.items())
    (directory / "serving.properties").write_text(lines)
    return directory


def tensorrt_llm_model(
    directory: Path, script: Mapping[str, object] | None = None, /, **options: object
) -> tuple[Path, dict[str, str]]:
    """The scripted model in front of TensorRT-LLM's executor over the fake, and the environment that has the fake.

    `script` is the scripted executor's, as far as an engine in processes of its own can follow it.
    """
    model = scripted_model(directory, **{"option.backend": "pytorch", **options})
    properties = model / "serving.properties"
    lines = [line for line in properties.read_text().splitlines() if not line.startswith("option.script")]
    properties.write_text("\n".join(lines) + "\n")
    names = {"start_seconds": "load_seconds", "start_error": "load_error"}
    translated = {names.get(name, name): value for name, value in (script or {}).items()}
    return model, fake_tensorrt_llm(directory.parent / f"{directory.name}-fake", script=translated)


# -- models that say what the user says --------------------------------------------------------------------------------

MARKER = {"hermes": "<tool_call> </think>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
SPECIAL = {"hermes": (), "llama3_json": ("<|python_tag|>",), "mistral": ("[TOOL_CALLS]",)}
"""Markers that these models have as special tokens."""


def echoing_model(directory: Path, name: str) -> Path:
    """A model that repeats what the user said last, with the marks of a format in its chat template."""
    model = scripted_model(directory, {"features": ["json"]}, **{"option.model_name": name})
    # The engine repeats the prompt, to its end token.
    (model / "chat_template.jinja").write_text(
        f"{{# tools {MARKER[name]} #}}{{{{ messages[-1].content }}}}{{{{ eos_token }}}}"
    )
    config = json.loads((TINY_STORIES / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    config["additional_special_tokens"] += SPECIAL[name]
    size = len(json.loads((TINY_STORIES / "tokenizer.json").read_text())["model"]["vocab"])
    config["added_tokens_decoder"] = {
        str(size + at): {"content": marker, "special": True} for at, marker in enumerate(SPECIAL[name])
    }
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"vocab_size": size + len(SPECIAL[name])}))
    return model


def link_checkpoint(directory: Path) -> Path:
    """Make a directory of the bundled model's checkpoint, without the engine and the settings that come with it."""
    directory.mkdir()
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        (directory / name).symlink_to(TINY_STORIES / name)
    return directory


HIDDEN = 256
"""The hidden size of the bundled model."""


def lora_tensors(
    modules: Sequence[str] = ("self_attn.q_proj",), *, rank: int = 8, hidden: int = HIDDEN, layers: Sequence[int] = (0,)
) -> dict[str, list[int]]:
    """The names of an adapter's tensors and their shapes."""
    tensors = {}
    for layer in layers:
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = [rank, hidden]
            tensors[f"{name}.lora_B.weight"] = [hidden, rank]
    return tensors


def write_tensors(file: Path, tensors: Mapping[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_adapter(folder: Path, tensors: Mapping[str, Any] | None = None, **config: Any) -> Path:
    """An adapter in `folder`. `config` changes its adapter_config.json; None leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **config}
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(kept))
    write_tensors(folder / "adapter_model.safetensors", lora_tensors() if tensors is None else tensors)
    return folder

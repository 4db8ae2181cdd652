"""Model directories whose tokens are known: the bundled tokenizer in front of an executor that follows a script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fakes.installation import fake_tensorrt_llm

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
    """The same in front of TensorRT-LLM's executor over the fake, and the environment that has the fake.

    `script` is the scripted executor's, as far as an engine in processes of its own can follow it.
    """
    model = scripted_model(directory, **{"option.backend": "pytorch", **options})
    properties = model / "serving.properties"
    lines = [line for line in properties.read_text().splitlines() if not line.startswith("option.script")]
    properties.write_text("\n".join(lines) + "\n")
    names = {"start_seconds": "load_seconds", "start_error": "load_error"}
    translated = {names.get(name, name): value for name, value in (script or {}).items()}
    return model, fake_tensorrt_llm(directory.parent / f"{directory.name}-fake", script=translated)

"""Engine files of TensorRT-LLM before 0.8, which no current TensorRT-LLM reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from djl_trtllm.errors import LayoutError
from djl_trtllm.model.json_file import read_object

_OLD_FILE = re.compile(r".+_rank\d+\.engine")
_IN_NAME = {"precision": r"_(b?float\d+)_", "tensor_parallel": r"_tp(\d+)_", "pipeline_parallel": r"_pp(\d+)_"}
_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_DEGREES = {
    "tensor_parallel": "OPTION_TENSOR_PARALLEL_DEGREE",
    "pipeline_parallel": "OPTION_PIPELINE_PARALLEL_DEGREE",
}
_LIMITS = {
    "max_batch_size": "OPTION_MAX_ROLLING_BATCH_SIZE",
    "max_input_len": "OPTION_MAX_INPUT_LEN",
    "max_output_len": "OPTION_MAX_OUTPUT_LEN",
    "max_beam_width": "OPTION_MAX_BEAM_WIDTH",
}


@dataclass(frozen=True)
class OldEngine:
    """`trt_llm_model_float16_tp2_rank0.engine`, and a config.json with `builder_config` and `plugin_config`.

    Early LMI repositories hold such files (LMI document, Model Artifacts Structure). `settings` are the variables with
    which `djl-trtllm compile` builds an equivalent engine.
    """

    directory: Path
    file: str
    settings: Mapping[str, str]

    @classmethod
    def find(cls, directory: Path) -> OldEngine | None:
        """The old engine in a directory, or None. Raises LayoutError for a damaged config.json."""
        files = sorted(path.name for path in directory.glob("*.engine"))
        config = read_object(directory / "config.json", LayoutError) or {}
        builder = config.get("builder_config")
        named = [name for name in files if _OLD_FILE.fullmatch(name)]
        if not named and not (files and isinstance(builder, dict)):
            return None
        file = named[0] if named else files[0]
        in_name = {key: found[1] for key, pattern in _IN_NAME.items() if (found := re.search(pattern, file))}
        builder = {**in_name, **(builder if isinstance(builder, dict) else {})}
        settings = {
            variable: str(builder[key]) for key, variable in _DEGREES.items() if str(builder.get(key, 1)) != "1"
        }
        if (dtype := _DTYPES.get(str(builder.get("precision")))) is not None:
            settings["OPTION_DTYPE"] = dtype
        for limit, variable in _LIMITS.items():
            value = builder.get(limit)
            if isinstance(value, int) and (limit, value) != ("max_beam_width", 1):
                settings[variable] = str(value)
        return cls(directory, file, settings)

    @property
    def refusal(self) -> str:
        """The message that says which TensorRT-LLM reads it and how to compile it again."""
        variables = "".join(f"{name}={value} " for name, value in self.settings.items())
        return (
            f"{self.directory} holds an engine of TensorRT-LLM before 0.8 ({self.file}; LMI containers 0.25 and 0.26 "
            "write such files), and no later one reads it: serve it with the container that compiled it, or compile "
            f"the Hugging Face checkpoint again with `{variables}djl-trtllm compile CHECKPOINT OUT`"
        )

"""Where engines are kept, and on what they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from djl_trtllm.config.option import Option
from djl_trtllm.config.options.documents import OURS
from djl_trtllm.config.options.group import OptionGroup


class EngineOptions(OptionGroup):
    """Engine cache, threads and test hooks."""

    engine_cache_dir: Annotated[
        Path | None,
        Option(
            "option.engine_cache_dir",
            "Folder where compiled engines are kept and looked up.",
            example="/var/cache/djl-trtllm",
            default_note="djl-trtllm in DJL_CACHE_DIR, else in SERVING_DOWNLOAD_DIR, else ~/.cache/djl-trtllm",
            effect="folder of the engine cache",
            source=OURS,
        ),
    ] = None
    inference_num_threads: Annotated[
        int | None,
        Option(
            "option.inference_num_threads",
            "CPU threads of the engine.",
            unit="threads",
            at_least=1,
            example="4",
            default_note="chosen by OpenVINO: the physical cores",
            tensorrt="ignored: the engine runs on the GPU",
            pytorch="ignored: the engine runs on the GPU",
            openvino="INFERENCE_NUM_THREADS",
            source="OpenVINO",
        ),
    ] = None
    script: Annotated[
        str | None,
        Option(
            "option.script",
            "What the scripted executor answers, as JSON. For tests and benchmarks of the server; no model is loaded.",
            example='{"tokens": 16}',
            effect="read by `option.backend=scripted` only",
            source=OURS,
        ),
    ] = None

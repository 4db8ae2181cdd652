"""Where engines are kept, and on what they run."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.config.options.documents import OURS
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class EngineOptions(OptionGroup):
    """Engine cache, threads and test hooks."""

    engine_cache_dir: Path | None = option(
        None,
        "Folder where compiled engines are kept and looked up.",
        example="/var/cache/djl-trtllm",
        default_note="djl-trtllm in DJL_CACHE_DIR, else in SERVING_DOWNLOAD_DIR, else ~/.cache/djl-trtllm",
        effect="folder of the engine cache",
        source=OURS,
    )
    engine_cache_max_gb: float = option(
        256.0,
        "Size of the engine cache: an engine that is added removes those used longest ago beyond it. Engines in "
        "use stay.",
        unit="GB",
        above=0,
        effect="bound of the engine cache",
        source=OURS,
    )
    engine_cache: str | None = option(
        None,
        "An `s3://` address where a fleet of machines keeps compiled engines: an engine that is there is fetched, "
        "one that is not is compiled by one machine and put there, while the others wait.",
        example="s3://my-bucket/engines",
        default_note="none: engines are kept in option.engine_cache_dir only",
        effect="engines are looked up and kept there as well",
        source=OURS,
    )
    engine_cache_wait: float = option(
        3600.0,
        "How long to wait for another machine that compiles the same engine for `option.engine_cache`, before "
        "compiling it here as well.",
        unit="seconds",
        at_least=0,
        effect="longest wait for another machine's engine",
        source=OURS,
    )
    inference_num_threads: int | None = option(
        None,
        "CPU threads of the engine.",
        unit="threads",
        at_least=1,
        example="4",
        default_note="chosen by OpenVINO: the physical cores",
        source="OpenVINO",
    )
    script: str | None = option(
        None,
        "What the scripted executor answers, as JSON. For tests and benchmarks of the server; no model is loaded.",
        example='{"tokens": 16}',
        source=OURS,
    )

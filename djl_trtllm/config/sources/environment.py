"""The environment as sources: `OPTION_*`, `SERVING_*`, SageMaker's variables and those of other servers.

The rules are DJL Serving's: its model server's for `OPTION_*`, `SERVING_*` and `SAGEMAKER_*`, its container's start
script for the variables it translates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from djl_trtllm.config.options.registry import find
from djl_trtllm.config.sources.origin import Origin
from djl_trtllm.config.sources.properties import Layer, Setting, Source

OPTION_PREFIX = "OPTION_"
SERVING_PREFIX = "SERVING_"
ARGUMENT_PREFIX = "ARGS_"
_PLAIN_UPPER = re.compile(r"[A-Z_0-9]+")
_MEBIBYTE = 1024 * 1024

OPTION_SPECIALS: Mapping[str, str] = {"entrypoint": "option.entryPoint", "engine": "engine"}
"""`OPTION_ENTRYPOINT` and `OPTION_ENGINE`, lower-cased, and the keys they mean."""

SERVING_SPECIALS: Mapping[str, str] = {"min_workers": "minWorkers", "max_workers": "maxWorkers"}
"""`SERVING_*` variables whose key is not their name in lower case."""

SAGEMAKER: tuple[tuple[str, str], ...] = (
    ("SAGEMAKER_BIND_TO_PORT", "inference_port"),
    ("SAGEMAKER_MAX_REQUEST_SIZE", "max_request_size"),
    ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "max_request_size"),
    ("SAGEMAKER_NUM_MODEL_WORKERS", "minWorkers"),
    ("SAGEMAKER_NUM_MODEL_WORKERS", "maxWorkers"),
    ("SAGEMAKER_STARTUP_TIMEOUT", "option.model_loading_timeout"),
    ("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", "option.predict_timeout"),
)
"""SageMaker's variables and the keys they set; of two variables for one key the first is used."""

NAMED_MODEL: tuple[tuple[str, str], ...] = (
    ("HF_MODEL_ID", "option.model_id"),
    ("HF_REVISION", "option.revision"),
)
"""Variables that name the model that is served, and the keys they set."""

PLAIN: tuple[tuple[str, str], ...] = (
    ("HF_TASK", "option.task"),
    ("TENSOR_PARALLEL_DEGREE", "option.tensor_parallel_degree"),
    ("PIPELINE_PARALLEL_DEGREE", "option.pipeline_parallel_degree"),
    ("PYTHON_EXECUTABLE", "option.pythonExecutable"),
    ("DJL_CLUSTER_SIZE", "option.cluster_size"),
    ("SAGEMAKER_HEALTH_CHECK_OVERRIDE", "health_check_override"),
    ("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "option.default_accept"),
    ("PREDICT_TIMEOUT", "option.predict_timeout"),
    ("MODEL_LOADING_TIMEOUT", "option.model_loading_timeout"),
    ("DJL_ENTRY_POINT", "option.entryPoint"),
    ("DJL_CACHE_DIR", "cache_dir"),
)
"""Variables that DJL Serving reads under their own names, and the keys they set."""

TRANSLATED: tuple[tuple[str, str], ...] = (
    ("HF_MODEL_QUANTIZE", "option.quantize"),
    ("HF_MODEL_TRUST_REMOTE_CODE", "option.trust_remote_code"),
    ("SM_NUM_GPUS", "option.tensor_parallel_degree"),
    ("MAX_CONCURRENT_REQUESTS", "job_queue_size"),
    ("MAX_BATCH_PREFILL_TOKENS", "option.max_rolling_batch_prefill_tokens"),
    ("MAX_BATCH_SIZE", "option.max_rolling_batch_size"),
    ("ENABLE_CUDA_GRAPHS", "option.enforce_eager"),
    ("CUDA_MEMORY_FRACTION", "option.kv_cache_free_gpu_mem_fraction"),
)
"""Variables of other servers (Text Generation Inference, SageMaker), as DJL Serving's container translates them."""


IGNORED_VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(
        ("JAVA_OPTS", "DEFAULT_JVM_OPTS", "SAGEMAKER_MODEL_SERVER_VMARGS", "MAX_NETTY_BUFFER_SIZE"),
        "this server runs no Java; max_request_size bounds requests",
    ),
    **dict.fromkeys(("DJL_LEADER_ADDR", "DJL_WORKER_ADDR_FORMAT", "MASTER_ADDR"), "a model runs on one machine"),
    **dict.fromkeys(
        ("LMI_DEBUG_NSYS_ENABLED", "DJL_PYTHON_PROFILING", "DJL_PYTHON_PROFILING_TOP_OBJ"),
        "run the server under a profiler instead",
    ),
    **dict.fromkeys(("SM_TELEMETRY_LOG_REV_2022_12", "OPT_OUT_TRACKING"), "this server sends no telemetry"),
    "MODEL_SERVER_HOME": "the server is a Python package and has no folder of its own",
    "ALLOW_REQUEST_HANDLER_OVERRIDE": "a request cannot choose the code that answers it",
    "DJL_VENV_DIR": "the server's own environment is used",
    "DJL_OFFLINE": "HF_HUB_OFFLINE=1 keeps the Hugging Face libraries from the network",
    "NO_OMP_NUM_THREADS": "OMP_NUM_THREADS is left as it is; option.inference_num_threads sets the engine's threads",
    "SM_NEO_EXECUTION_CONTEXT": "with it the container runs `djl-trtllm compile`; it does not change a server",
}
"""Variables that DJL Serving's container reads and that have no effect here, and why."""


def read_environment(environ: Mapping[str, str]) -> tuple[Source, ...]:
    """One source per kind of variable. Empty variables and other variables are ignored."""
    present = {name: value for name, value in environ.items() if value.strip()}
    # Without HF_MODEL_ID, HF_REVISION is a revision of a model that is named elsewhere.
    named = tuple(_named(present, NAMED_MODEL)) if "HF_MODEL_ID" in present else ()
    revision = () if named else tuple(_named(present, NAMED_MODEL[1:]))
    notes = tuple(f"{name} has no effect: {why}" for name, why in IGNORED_VARIABLES.items() if name in present)
    return (
        _sagemaker(present),
        Source(Layer.NAMED_MODEL, named),
        Source(Layer.OPTION, tuple(_options(present))),
        Source(Layer.SERVING, tuple(_serving(present))),
        Source(Layer.PLAIN, (*revision, *_named(present, PLAIN)), notes=notes),
        _translated(present),
    )


def option_key(variable: str) -> str:
    """The key that an `OPTION_*` variable sets: in lower case unless the name has lower-case letters already."""
    rest = variable[len(OPTION_PREFIX) :]
    name = rest.lower() if _PLAIN_UPPER.fullmatch(rest) else rest
    return OPTION_SPECIALS.get(name, f"option.{name}")


def serving_key(variable: str) -> str:
    """The key that a `SERVING_*` variable sets."""
    name = variable[len(SERVING_PREFIX) :].lower()
    return SERVING_SPECIALS.get(name, name)


def variables_of(key: str) -> tuple[str, ...]:
    """The variables that set `key`, the one to prefer first."""
    names = []
    special = {target: name for name, target in (*OPTION_SPECIALS.items(), *SERVING_SPECIALS.items())}
    if key.startswith("option.") or key in OPTION_SPECIALS.values():
        names.append(OPTION_PREFIX + special.get(key, key.removeprefix("option.")).upper())
    else:
        names.append(SERVING_PREFIX + special.get(key, key).upper())
    names += [name for name, target in (*SAGEMAKER, *NAMED_MODEL, *PLAIN, *TRANSLATED) if target == key]
    return tuple(dict.fromkeys(names))


def _setting(name: str, key: str, value: str, wrote_value: str | None = None) -> Setting:
    return Setting(key, value, Origin.environment(name), name, wrote_value)


def _named(environ: Mapping[str, str], table: tuple[tuple[str, str], ...]) -> Iterator[Setting]:
    return (_setting(name, key, environ[name]) for name, key in table if name in environ)


def _options(environ: Mapping[str, str]) -> Iterator[Setting]:
    for name, value in sorted(environ.items()):
        if name.startswith(OPTION_PREFIX):
            yield _setting(name, option_key(name), value)
        elif name.startswith(ARGUMENT_PREFIX):
            key = name[len(ARGUMENT_PREFIX) :].lower()
            if find(key := SERVING_SPECIALS.get(key, key)) is not None:
                yield _setting(name, key, value)


def _serving(environ: Mapping[str, str]) -> Iterator[Setting]:
    for name, value in sorted(environ.items()):
        if name.startswith(SERVING_PREFIX):
            yield _setting(name, serving_key(name), value)


def _sagemaker(environ: Mapping[str, str]) -> Source:
    settings: list[Setting] = []
    problems: list[str] = []
    for setting in _named(environ, SAGEMAKER):
        if setting.wrote != "SAGEMAKER_MAX_PAYLOAD_IN_MB":
            settings.append(setting)
        elif re.fullmatch(r"\s*[1-9][0-9]{0,8}\s*", setting.value):
            size = str(int(setting.value) * _MEBIBYTE)
            settings.append(_setting(setting.wrote, setting.key, size, wrote_value=setting.value))
        else:
            problems.append(f"{setting.shown}: expected a whole number (megabytes), at least 1")
    return Source(Layer.SAGEMAKER, tuple(settings), problems=tuple(problems))


def _translated(environ: Mapping[str, str]) -> Source:
    settings: list[Setting] = []
    warnings: list[str] = []
    features = environ.get("SERVING_FEATURES", "trtllm").lower()
    for setting in _named(environ, TRANSLATED):
        if setting.wrote == "SM_NUM_GPUS" and setting.value.strip() == "0":
            warnings.append("SM_NUM_GPUS=0 means that there is no GPU, and does not set option.tensor_parallel_degree")
        elif setting.wrote == "CUDA_MEMORY_FRACTION" and "trtllm" not in features:
            warnings.append(
                f"{setting.shown} has no effect: with SERVING_FEATURES={features} it configures another library; "
                "set OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION"
            )
        elif setting.wrote == "ENABLE_CUDA_GRAPHS":
            eager = "false" if setting.value.strip().lower() == "true" else "true"
            settings.append(_setting(setting.wrote, setting.key, eager, wrote_value=setting.value))
        else:
            settings.append(setting)
    return Source(Layer.TRANSLATED, tuple(settings), tuple(warnings))

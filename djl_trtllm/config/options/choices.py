"""The types of options: enumerations of values, and the types of the fields of `Options` that code reads.

Members are strings: `options.backend == "openvino"` and `options.backend is Backend.OPENVINO` both hold.
"""

import enum
from pathlib import Path
from typing import Literal

from djl_trtllm.plugins import BACKENDS, plugins


class Choice(str, enum.Enum):
    """A value of an enumeration; `str()` gives the value."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def all_values(cls) -> tuple[str, ...]:
        return tuple(member.value for member in cls)


class Task(Choice):
    """The task of a model."""

    AUTO = "auto"
    GENERATE = "generate"
    EMBED = "embed"
    """A text becomes a vector."""
    SCORE = "score"
    """A pair of texts becomes a number, by a cross-encoder."""


class Backend(Choice):
    """The engine that runs the model: the members, and the names of backends in other packages."""

    AUTO = "auto"
    TENSORRT = "tensorrt"
    PYTORCH = "pytorch"
    AUTODEPLOY = "autodeploy"
    VLLM = "vllm"
    OPENVINO = "openvino"
    SCRIPTED = "scripted"

    @classmethod
    def all_values(cls) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().all_values(), *plugins(BACKENDS))))

    @classmethod
    def _missing_(cls, value: object) -> "Backend | None":
        if not isinstance(value, str) or value not in plugins(BACKENDS):
            return None
        if value not in _ADDED:
            _ADDED[value] = added = str.__new__(cls, value)
            added._name_, added._value_ = value.upper(), value
        return _ADDED[value]


_ADDED: dict[str, Backend] = {}
"""Values beside the members. There is one object of each, so that `is` compares them."""


class DType(Choice):
    AUTO = "auto"
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Quantization(Choice):
    INT8 = "int8"
    INT4 = "int4"
    AWQ = "awq"
    W4A8_AWQ = "w4a8_awq"
    SMOOTHQUANT = "smoothquant"
    FP8 = "fp8"


class KvCacheDType(Choice):
    AUTO = "auto"
    FP16 = "fp16"
    FP32 = "fp32"
    INT8 = "int8"
    FP8 = "fp8"


class SchedulerPolicy(Choice):
    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    STATIC_BATCH = "static_batch"


class ChunkingPolicy(Choice):
    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


class BatchingType(Choice):
    INFLIGHT = "inflight"
    STATIC = "static"


class QuantAlgorithm(Choice):
    """TensorRT-LLM's names of quantisations."""

    W8A16 = "W8A16"
    W4A16 = "W4A16"
    W4A16_AWQ = "W4A16_AWQ"
    W4A8_AWQ = "W4A8_AWQ"
    W8A16_GPTQ = "W8A16_GPTQ"
    W4A16_GPTQ = "W4A16_GPTQ"
    W8A8_SQ_PER_CHANNEL = "W8A8_SQ_PER_CHANNEL"
    W8A8_SQ_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"  # noqa: S105  # a name
    W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN"  # noqa: S105
    W4A8_QSERVE_PER_GROUP = "W4A8_QSERVE_PER_GROUP"
    W4A8_QSERVE_PER_CHANNEL = "W4A8_QSERVE_PER_CHANNEL"
    FP8 = "FP8"
    FP8_PER_CHANNEL_PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"  # noqa: S105
    FP8_BLOCK_SCALES = "FP8_BLOCK_SCALES"
    INT8 = "INT8"
    MIXED_PRECISION = "MIXED_PRECISION"
    NVFP4 = "NVFP4"
    W4A8_NVFP4_FP8 = "W4A8_NVFP4_FP8"
    W4A8_MXFP4_FP8 = "W4A8_MXFP4_FP8"
    W4A8_MXFP4_MXFP8 = "W4A8_MXFP4_MXFP8"
    W4A16_MXFP4 = "W4A16_MXFP4"
    NO_QUANT = "NO_QUANT"


class GuidedDecoding(Choice):
    XGRAMMAR = "xgrammar"
    LLGUIDANCE = "llguidance"


class UnknownParameters(Choice):
    """The answer to a request with fields that are not known."""

    NOTE = "note"
    REFUSE = "refuse"
    WARN = "warn"


class TritonModel(Choice):
    """The model of Triton whose inputs and outputs its clients use."""

    ENSEMBLE = "ensemble"
    LLMAPI = "llmapi"
    """`tensorrt_llm` of TensorRT-LLM's LLM API, with inputs such as `sampling_param_max_tokens`."""


class LogFormat(Choice):
    TEXT = "text"
    JSON = "json"


class LogLevel(Choice):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class KvCacheQuantAlgorithm(Choice):
    """TensorRT-LLM's names of quantisations of the KV cache."""

    FP8 = "FP8"
    INT8 = "INT8"
    NVFP4 = "NVFP4"


class LoadFormat(Choice):
    AUTO = "auto"
    DUMMY = "dummy"


class KvCacheType(Choice):
    PAGED = "paged"
    CONTINUOUS = "continuous"
    DISABLED = "disabled"


class SamplerType(Choice):
    AUTO = "auto"
    TRTLLM = "TRTLLMSampler"
    TORCH = "TorchSampler"


class OptionTypes:
    """The types of the options that code reads or TensorRT-LLM has as enumerations, in the order of the documents.

    A type is plain, an enumeration or `tuple[TYPE, ...]`, or a union of one with None (the default) and `Literal`
    keywords. The rows of other options name their types.
    """

    # model
    model_id: str | None
    revision: str | None
    task: Task
    trust_remote_code: bool
    model_name: str | None
    backend: Backend
    rolling_batch: str
    entry_point: str | None
    tokenizer: str | None
    chat_template: str | None
    tokenizer_revision: str | None
    hf_access_token: str | None
    load_format: LoadFormat
    dtype: DType
    # limits
    max_input_len: int
    max_output_len: int
    max_seq_len: int | None
    max_num_tokens: int | None
    strict_memory: bool
    max_rolling_batch_size: int
    max_num_sequences: int | None
    # kv_cache
    tokens_per_block: int
    kv_cache_free_gpu_mem_fraction: float | None
    max_tokens_in_paged_kv_cache: int | None
    enable_kv_cache_reuse: bool
    kv_cache_dtype: KvCacheDType
    max_attention_window: tuple[int, ...] | None
    host_cache_size: int | None
    kv_cache_type: KvCacheType | None
    paged_kv_cache: bool
    # scheduler
    batch_scheduler_policy: SchedulerPolicy
    context_chunking_policy: ChunkingPolicy | None
    enable_chunked_prefill: bool
    batching_type: BatchingType | None
    enable_overlap_scheduler: bool | None
    stream_interval: int | Literal["auto"]
    # parallelism
    tensor_parallel_degree: int | Literal["max"]
    pipeline_parallel_degree: int
    pp_partition: tuple[int, ...] | None
    context_parallel_size: int
    enable_attention_dp: bool
    gpus_per_node: int | None
    num_nodes: int
    cluster_size: int
    # engine
    engine_cache_dir: Path | None
    engine_cache_max_gb: float
    engine_cache: str | None
    engine_cache_wait: float
    inference_num_threads: int | None
    script: str | None
    # build
    gather_context_logits: bool
    input_timing_cache: Path | None
    workspace: Path | None
    # plugins
    gemm_plugin: str | None
    gemm_swiglu_plugin: str | None
    use_paged_context_fmha: bool
    extended_runtime_perf_knob_config: str | None
    # quantization
    quantize: Quantization | None
    smoothquant_alpha: float
    smoothquant_per_token: bool
    smoothquant_per_channel: bool
    awq_format: str
    calib_size: int
    calib_batch_size: int
    calib_batches: int | None
    calib_dataset: str
    quant_algo: QuantAlgorithm | None
    kv_cache_quant_algo: KvCacheQuantAlgorithm | None
    # architecture
    chatglm_model_version: str
    gpt_model_version: str
    rotary_base: float | None
    rotary_dim: int | None
    rotary_scaling_type: str | None
    rotary_scaling_factor: float | None
    # decoding
    max_beam_width: int
    guided_decoding_backend: GuidedDecoding | None
    stop_in_engine: bool | None
    sampler_type: SamplerType
    ignored_seed: Literal["refuse", "warn"]
    # speculation
    speculative_config: str | None
    speculative_decoding_mode: str | None
    speculative_draft_model: str | None
    speculative_length: int | None
    # pytorch
    use_cuda_graph: bool | None
    enforce_eager: bool
    cuda_graph_batch_sizes: tuple[int, ...] | None
    cuda_graph_max_batch_size: int | None
    orchestrator_type: str | None
    # vllm
    gpu_memory_utilization: float | None
    max_num_batched_tokens: int | None
    limit_mm_per_prompt: str | None
    allowed_media_domains: tuple[str, ...] | None
    # lora
    enable_lora: bool
    max_lora_rank: int
    lora_dir: str | None
    lora_target_modules: tuple[str, ...] | None
    lora_cache_gpu_memory_fraction: float
    # serving
    job_queue_size: int
    predict_timeout: float
    model_loading_timeout: float
    stream_write_timeout: float
    executor_hang_timeout: float
    retry_threshold: int
    resume_after_restart: bool
    executor_memory_limit: float | None
    executor_max_requests: int | None
    chat_template_timeout: float
    output_formatter: str | None
    tool_call_parser: str
    reasoning_parser: str
    tgi_compat: bool
    unknown_parameters: UnknownParameters
    strict: bool
    enable_stateful_sessions: bool
    sessions_expiration: float
    sessions_path: Path | None
    max_sessions: int
    stored_responses_memory: int
    stored_responses_timeout: float
    # server
    host: str
    port: int
    max_request_size: int
    server_error_http_code: int
    request_id_header_key: str
    monitor: bool | None
    shutdown_timeout: float
    fail_fast: bool
    install_requirements: bool
    adapter_roots: tuple[str, ...] | None
    download_dir: Path | None
    # connections
    max_connections: int
    max_header_size: int
    max_header_count: int
    max_url_size: int
    max_body_memory: int
    header_read_timeout: float
    body_read_timeout: float
    keep_alive_timeout: float
    websocket_idle_timeout: float
    # access
    api_key: str | None
    api_keys_file: Path | None
    cors_allowed_origin: tuple[str, ...] | None
    management_host: str
    management_port: int
    certificate_file: Path | None
    private_key_file: Path | None
    client_ca_file: Path | None
    # clients
    scheduling_policy: str
    client_header: str | None
    priority_header: str | None
    client_from_custom_attributes: bool
    max_requests_per_client: int
    forwarded_allow_ips: tuple[str, ...]
    # telemetry
    log_format: LogFormat
    log_level: LogLevel
    request_log: bool
    request_log_share: float
    otlp_traces_endpoint: str | None
    record_file: Path | None
    record_share: float
    record_prompts: str
    record_max_bytes: int
    # triton
    triton_model: TritonModel
    decoupled: bool | None
    triton_http_port: int
    triton_grpc_port: int
    triton_metrics_port: int
    # djl_server
    load_models: str | None
    model_store: str | None

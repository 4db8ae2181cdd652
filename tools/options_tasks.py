"""What people want to do, and the options for it: the index of `docs/options.md`, and `serving.properties.example`."""

from __future__ import annotations

FIRST = (
    "option.model_id",
    "option.tensor_parallel_degree",
    "option.max_input_len",
    "option.max_output_len",
    "option.max_rolling_batch_size",
    "option.max_num_tokens",
    "option.kv_cache_free_gpu_mem_fraction",
    "option.enable_kv_cache_reuse",
    "option.dtype",
    "option.quantize",
    "option.backend",
    "option.engine_cache_dir",
)
"""Keys of the options that matter first, in the order of a first configuration."""

TASKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("choose the model", ("option.model_id", "option.revision", "option.tokenizer", "option.trust_remote_code")),
    ("choose the engine", ("option.backend", "option.dtype", "option.load_format")),
    (
        "allow longer prompts and answers",
        ("option.max_input_len", "option.max_output_len", "option.max_seq_len", "option.max_num_tokens"),
    ),
    (
        "serve more requests at once",
        ("option.max_rolling_batch_size", "option.max_num_sequences", "option.batch_scheduler_policy"),
    ),
    (
        "shorten the time to the first token",
        ("option.enable_kv_cache_reuse", "option.enable_chunked_prefill", "option.max_num_tokens"),
    ),
    (
        "use less memory, or more of it",
        (
            "option.quantize",
            "option.kv_cache_dtype",
            "option.kv_cache_free_gpu_mem_fraction",
            "option.max_tokens_in_paged_kv_cache",
            "option.host_cache_size",
        ),
    ),
    (
        "use several GPUs",
        ("option.tensor_parallel_degree", "option.pipeline_parallel_degree", "option.moe_expert_parallel_size"),
    ),
    ("quantise while compiling", ("option.quantize", "option.awq_block_size", "option.calib_size")),
    (
        "keep compiled engines",
        ("option.engine_cache_dir", "option.engine_cache_max_gb", "option.engine_cache", "cache_dir"),
    ),
    ("serve LoRA adapters", ("option.enable_lora", "option.max_lora_rank", "option.lora_target_modules")),
    ("guide the output by a grammar", ("option.guided_decoding_backend",)),
    (
        "get responses in another form",
        ("option.output_formatter", "option.tgi_compat"),
    ),
    (
        "limit waiting and running time",
        ("job_queue_size", "option.predict_timeout", "option.stream_write_timeout", "option.model_loading_timeout"),
    ),
    ("recover from a failed engine", ("retry_threshold", "option.executor_hang_timeout", "fail_fast")),
    (
        "share the engine among clients",
        (
            *("scheduling_policy", "client_header", "max_requests_per_client", "priority_header"),
            *("forwarded_allow_ips", "client_from_custom_attributes"),
        ),
    ),
    (
        "bound bodies and connections",
        (
            *("max_request_size", "max_body_memory", "max_connections", "header_read_timeout", "keep_alive_timeout"),
            "websocket_idle_timeout",
        ),
    ),
    (
        "say who may do what, and encrypt",
        (
            *("api_key", "api_keys_file", "management_address", "cors_allowed_origin"),
            *("certificate_file", "private_key_file", "client_ca_file"),
        ),
    ),
    (
        "see what the server does",
        ("monitor", "log_format", "log_level", "request_log", "request_log_share", "otlp_traces_endpoint"),
    ),
    ("record requests, to replay them", ("record_file", "record_share", "record_prompts", "record_max_bytes")),
    ("set the address and the port", ("inference_host", "inference_port", "inference_address")),
    (
        "choose HTTP status codes",
        ("bad_request_http_code", "throttle_error_http_code", "timeout_http_code", "server_error_http_code"),
    ),
    ("register models while the server runs", ("model_store", "load_models")),
    ("refuse options that do not exist", ("option.strict",)),
)
"""Tasks, each with the keys of its options."""

"""What a Truss `config.yaml` for TensorRT-LLM can hold, name by name.

Three generations: `model_metadata` (or `build.arguments`, or `trt_llm.serve`) names a compiled engine that Triton
serves; `trt_llm.build` compiles one; `trt_llm` with `inference_stack: v2` serves a checkpoint. From the README and the
template of truss-examples and from truss/base/trt_llm_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping

ENGINE_SECTIONS = ("model_metadata", "build.arguments", "trt_llm.serve")
"""Where a compiled engine is named, by the generation."""

_ENGINE = {
    "engine_repository": "option.model_id",
    "tokenizer_repository": "option.tokenizer",
    "tensor_parallelism": "option.tensor_parallel_degree",
    "tensor_parallel_count": "option.tensor_parallel_degree",
    "pipeline_parallelism": "option.pipeline_parallel_degree",
    "pipeline_parallel_count": "option.pipeline_parallel_degree",
}

_BUILD = {
    "max_input_len": "option.max_input_len",
    "max_output_len": "option.max_output_len",
    "max_seq_len": "option.max_seq_len",
    "max_batch_size": "option.max_rolling_batch_size",
    "max_num_tokens": "option.max_num_tokens",
    "max_beam_width": "option.max_beam_width",
    "huggingface_ckpt_repository": "option.model_id",
    "checkpoint_repository.repo": "option.model_id",
    "checkpoint_repository.revision": "option.revision",
    "gather_all_token_logits": "option.gather_all_token_logits",
    "strongly_typed": "option.strongly_typed",
    "quantization_config.calib_size": "option.calib_size",
    "quantization_config.calib_dataset": "option.calib_dataset",
    "quantization_config.calib_max_seq_length": "option.calib_max_seq_length",
    "tensor_parallel_count": "option.tensor_parallel_degree",
    "pipeline_parallel_count": "option.pipeline_parallel_degree",
    "use_fused_mlp": "option.use_fused_mlp",
    "plugin_configuration.paged_kv_cache": "option.paged_kv_cache",
    "plugin_configuration.use_paged_context_fmha": "option.use_paged_context_fmha",
    "plugin_configuration.use_fp8_context_fmha": "option.use_fp8_context_fmha",
    "plugin_configuration.multi_block_mode": "option.multi_block_mode",
    "plugin_configuration.use_fused_mlp": "option.use_fused_mlp",
    "plugin_configuration.gemm_plugin": "option.gemm_plugin",
    "plugin_configuration.gpt_attention_plugin": "option.gpt_attention_plugin",
    "kv_cache_free_gpu_mem_fraction": "option.kv_cache_free_gpu_mem_fraction",
    "enable_chunked_context": "option.enable_chunked_context",
    "batch_scheduler_policy": "option.batch_scheduler_policy",
}

_RUNTIME = {
    "kv_cache_free_gpu_mem_fraction": "option.kv_cache_free_gpu_mem_fraction",
    "kv_cache_host_memory_bytes": "option.kv_cache_host_memory_bytes",
    "enable_chunked_context": "option.enable_chunked_context",
    "enable_chunked_prefill": "option.enable_chunked_prefill",
    "batch_scheduler_policy": "option.batch_scheduler_policy",
    "served_model_name": "option.model_name",
    "max_seq_len": "option.max_seq_len",
    "max_batch_size": "option.max_rolling_batch_size",
    "max_num_tokens": "option.max_num_tokens",
    "tensor_parallel_size": "option.tensor_parallel_degree",
}

OPTION_OF: Mapping[str, str] = {
    **{f"{section}.{name}": option for section in ENGINE_SECTIONS for name, option in _ENGINE.items()},
    **{f"trt_llm.build.{name}": option for name, option in _BUILD.items()},
    **{f"trt_llm.runtime.{name}": option for name, option in _RUNTIME.items()},
    "model_name": "option.model_name",
}
"""Names that are options of this server."""

_WEIGHTS, _CACHE = "option.quantize", "option.kv_cache_quant_algo"
QUANTIZATION: Mapping[str, Mapping[str, str]] = {
    "no_quant": {_WEIGHTS: "none"},
    "fp8": {_WEIGHTS: "fp8"},
    "fp8_kv": {_WEIGHTS: "fp8", _CACHE: "FP8"},
    "fp4": {"option.quant_algo": "NVFP4"},
    "fp4_kv": {"option.quant_algo": "NVFP4", _CACHE: "FP8"},
    "weights_int8": {_WEIGHTS: "int8"},
    "weights_kv_int8": {_WEIGHTS: "int8", _CACHE: "INT8"},
    "weights_int4": {_WEIGHTS: "int4"},
    "weights_int4_kv_int8": {_WEIGHTS: "int4", _CACHE: "INT8"},
    "smooth_quant": {_WEIGHTS: "smoothquant"},
}
"""What each `quantization_type` sets; the last five are those of 2024."""

_CONTAINER = "it configures the container that Truss builds"
_MACHINE = "GPUs, processors and memory are those of this machine"
_REQUESTS = "one process takes in all requests; job_queue_size limits the waiting queue"
_SERVER = "it configures Truss's own server"
_ARCHITECTURE = "the architecture is read from the checkpoint's config.json"
_BUILDER = "the engine is compiled here, when the model is loaded or by djl-trtllm compile"
_ENVIRONMENT = "variables are not read from a file; set them in the server's environment"
_LORA = "put LoRA adapters into the model's folder `adapters` and set option.enable_lora=true"
_SPECULATION = "speculative decoding is not offered"
_REQUEST = "this is an example of a request and sets nothing"

IGNORED: Mapping[str, str] = {
    "apply_library_patches": _CONTAINER,
    "base_image": _CONTAINER,
    "build": _CONTAINER,
    "build_commands": _CONTAINER,
    "bundled_packages_dir": _CONTAINER,
    "cache_internal": _CONTAINER,
    "data_dir": _CONTAINER,
    "deployment_strategy": _CONTAINER,
    "docker_server": _CONTAINER,
    "environment_variables": _ENVIRONMENT,
    "examples_filename": _REQUEST,
    "external_data": _CONTAINER,
    "external_package_dirs": _CONTAINER,
    "hf_cache": _CONTAINER,
    "live_reload": _CONTAINER,
    "model_cache": _CONTAINER,
    "python_version": _CONTAINER,
    "requirements": _CONTAINER,
    "requirements_file": _CONTAINER,
    "spec_version": _CONTAINER,
    "system_packages": _CONTAINER,
    "use_local_src": _CONTAINER,
    "description": _SERVER,
    "input_type": _SERVER,
    "model_class_filename": _SERVER,
    "model_class_name": _SERVER,
    "model_framework": _SERVER,
    "model_module_dir": _SERVER,
    "model_type": _SERVER,
    "resources": _MACHINE,
    "runtime": _SERVER,
    "runtime.num_workers": _REQUESTS,
    "runtime.predict_concurrency": _REQUESTS,
    "runtime.streaming_read_timeout": "see option.stream_write_timeout and option.predict_timeout",
    "train": _CONTAINER,
    "training": _CONTAINER,
    "model_metadata": "this describes the model for people and sets nothing",
    "model_metadata.example_model_input": _REQUEST,
    "trt_llm.build.base_model": _ARCHITECTURE,
    "trt_llm.build.base_model_architecture": _ARCHITECTURE,
    "trt_llm.build.job_type": _ARCHITECTURE,
    "trt_llm.build.checkpoint_repository.runtime_secret_name": "a token for the hub is read from HF_TOKEN",
    "trt_llm.build.lora_adapters": _LORA,
    "trt_llm.build.lora_configuration": _LORA,
    "trt_llm.build.max_prompt_embedding_table_size": "text is the only input that is served",
    "trt_llm.build.moe_expert_parallel_option": "the engine decides how experts are spread",
    "trt_llm.build.num_builder_gpus": _BUILDER,
    "trt_llm.build.plugin_configuration": "the plugins are TensorRT-LLM's defaults",
    "trt_llm.build.sequence_parallel_count": "sequences are not split over GPUs",
    "trt_llm.build.skip_build_result": _BUILDER,
    "trt_llm.build.speculator": _SPECULATION,
    "trt_llm.runtime.patch_kwargs": "set the option of that name; docs/options.md lists them",
    "trt_llm.runtime.request_default_max_tokens": "a request says max_new_tokens itself",
    "trt_llm.runtime.total_token_limit": "the waiting queue is limited in requests, not in tokens; see job_queue_size",
    "trt_llm.runtime.webserver_default_route": "every route is served",
    "trt_llm.version_overrides": _CONTAINER,
}
"""Names that have no effect here, with the reasons; a name covers everything inside it that is not listed itself."""

TO_ACT_ON = frozenset({_ENVIRONMENT, _LORA, _SPECULATION, IGNORED["trt_llm.runtime.patch_kwargs"]})
"""The reasons that need an action of the user."""

MARKS = ("model_metadata", "trt_llm", "build", "resources", "runtime", "base_image", "python_version", "secrets")
"""Keys that identify a `config.yaml` of Truss."""

ENGINE_PRESETS: Mapping[str, str] = {
    "option.max_rolling_batch_size": "128",
    "option.max_num_sequences": "64",
    "option.max_tokens_in_paged_kv_cache": "10000",
    "option.kv_cache_free_gpu_mem_fraction": "0.1",
}
"""The values of the first generation's own `config.pbtxt`, without options that no engine has any more."""

BUILD_PRESETS: Mapping[str, str] = {
    "option.max_rolling_batch_size": "256",
    "option.max_num_tokens": "8192",
    "option.kv_cache_free_gpu_mem_fraction": "0.9",
    "option.max_input_len": "8192",
    "option.max_output_len": "8192",
    "option.enable_chunked_context": "true",
    "option.batch_scheduler_policy": "guaranteed_no_evict",
}
"""Defaults of `trt_llm`, which has no limit of lengths: the tokens of one iteration limit both."""

STACK_PRESETS: Mapping[str, str] = {
    "option.max_rolling_batch_size": "256",
    "option.max_num_tokens": "8192",
    "option.max_input_len": "8192",
    "option.max_output_len": "8192",
    "option.enable_chunked_context": "true",
}
"""Defaults of `trt_llm` with `inference_stack: v2`."""

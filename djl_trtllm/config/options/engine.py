"""Engines: where they are kept, how they are spread over GPUs and machines, and options of PyTorch's only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from djl_trtllm.config.options.choices import Orchestrator
from djl_trtllm.config.options.option import (
    DJL,
    LMI,
    OURS,
    TRITON,
    TRTLLM,
    OptionGroup,
    amount,
    count,
    devices,
    option,
    unset,
)


class EngineOptions(OptionGroup, name="engine", heading="Engine", source=OURS):
    """Engine cache, threads and test hooks."""

    engine_cache_dir: Path | None = unset(
        "Folder where compiled engines are kept and looked up.",
        example="/var/cache/djl-trtllm",
        default_note="djl-trtllm in DJL_CACHE_DIR, else in SERVING_DOWNLOAD_DIR, else ~/.cache/djl-trtllm",
        effect="folder of the engine cache",
    )
    engine_cache_max_gb: float = option(
        256.0,
        "Size of the engine cache: an engine that is added removes those used longest ago beyond it. Engines in "
        "use stay.",
        **amount("GB"),
        effect="bound of the engine cache",
    )
    engine_cache: str | None = unset(
        "An `s3://` address where a fleet of machines keeps compiled engines: an engine that is there is fetched, "
        "one that is not is compiled by one machine and put there, while the others wait.",
        example="s3://my-bucket/engines",
        default_note="none: engines are kept in option.engine_cache_dir only",
        effect="engines are looked up and kept there as well",
    )
    engine_cache_wait: float = option(
        3600.0,
        "How long to wait for another machine that compiles the same engine for `option.engine_cache`, before "
        "compiling it here as well.",
        unit="seconds",
        at_least=0,
        effect="longest wait for another machine's engine",
    )
    inference_num_threads: int | None = unset(
        "CPU threads of the engine.",
        **count("threads"),
        example="4",
        default_note="chosen by OpenVINO: the physical cores",
        source="OpenVINO",
    )
    script: str | None = unset(
        "What the scripted executor answers, as JSON. For tests and benchmarks of the server; no model is loaded.",
        example='{"tokens": 16}',
    )


class ParallelismOptions(OptionGroup, name="parallelism", heading="Parallelism", source=TRTLLM):
    """Degrees of parallelism, and the communication between the parts."""

    tensor_parallel_degree: int | Literal["max"] = option(
        1,
        "GPUs over which each layer is split; `max` takes all GPUs of the machine (divided by the pipeline "
        "parallel degree). It must divide the number of attention heads, and divide that of keys and values or be a "
        "multiple of it.",
        aliases=(
            "option.tensor_parallel_size",
            "option.tp_size",
            "option.tensor_parallelism",
            "option.tensor_parallel_count",
        ),
        **devices("GPUs"),
        source=LMI,
    )
    pipeline_parallel_degree: int = option(
        1,
        "Groups of GPUs over which the layers are spread one after the other.",
        aliases=(
            "option.pipeline_parallel_size",
            "option.pp_size",
            "option.pipeline_parallelism",
            "option.pipeline_parallel_count",
        ),
        **count("groups"),
        source=DJL,
    )
    pp_partition: tuple[int, ...] | None = unset(
        "Layers of each group of `option.pipeline_parallel_degree`, in order: as many numbers as groups. For groups on "
        "GPUs of different size, or models whose first or last layers are larger.",
        **count("layers"),
        example="20,20,20,20",
        default_note="as equal as possible",
    )
    context_parallel_size: int = option(1, "GPUs over which one sequence is split.", **devices("GPUs"), source=DJL)
    moe_tensor_parallel_size: int | None = unset(
        "GPUs over which each expert of a mixture-of-experts model is split.",
        **devices("GPUs"),
        example="1",
        default_note="chosen by the engine",
        source=DJL,
    )
    moe_expert_parallel_size: int | None = unset(
        "GPUs over which the experts are spread, each whole.",
        **devices("GPUs"),
        example="1",
        default_note="chosen by the engine",
        source=DJL,
    )
    moe_cluster_parallel_size: int | None = unset(
        "GPUs of one cluster that share an expert.", **devices("GPUs"), example="1", default_note="chosen by the engine"
    )
    enable_attention_dp: bool = option(
        False, "Give each GPU its own requests for attention, and split only the rest of the model.", source=DJL
    )
    enable_lm_head_tp_in_adp: bool = option(
        False, "Split the output layer over the GPUs under attention data parallelism."
    )
    embedding_parallel_mode: Literal["NONE", "SHARDING_ALONG_VOCAB", "SHARDING_ALONG_HIDDEN"] = option(
        "SHARDING_ALONG_VOCAB", "How the embedding table is split over GPUs.", source=DJL
    )
    allreduce_strategy: Literal[
        "AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"
    ] = option("AUTO", "Kernel that adds up the parts of a layer over GPUs.")
    gpus_per_node: int | None = unset(
        "GPUs of one machine.", **devices("GPUs"), example="8", default_note="those of this machine"
    )
    num_nodes: int = option(
        1,
        "Machines over which one model is spread. The server is started on the first, and trtllm-llmapi-launch "
        "starts the ranks on all of them.",
        **devices("machines"),
        source=TRITON,
    )
    cluster_size: int = option(
        1,
        "Machines over which DJL Serving spreads one model (DJL_CLUSTER_SIZE); means what `option.num_nodes` does.",
        **devices("machines"),
        source=DJL,
    )


class PyTorchOptions(OptionGroup, name="pytorch", heading="TensorRT-LLM's PyTorch backend", source=TRTLLM):
    """Attention, graphs, statistics of the PyTorch backend."""

    attn_backend: str | None = unset(
        "Attention kernels: TRTLLM, FLASHINFER, VANILLA, ...",
        example="TRTLLM",
        default_note="the engine's own",
        source=DJL,
    )
    moe_backend: str | None = unset(
        "Kernels of mixture-of-experts layers: CUTLASS, TRTLLM, DEEPGEMM, WIDEEP, ...",
        example="CUTLASS",
        default_note="the engine's own",
        source=DJL,
    )
    use_cuda_graph: bool | None = unset(
        "Run decoding steps as CUDA graphs.", example="true", default_note="the engine's own: on", source=DJL
    )
    enforce_eager: bool = option(
        False, "Run without CUDA graphs (ENABLE_CUDA_GRAPHS=false). `option.use_cuda_graph` overrides it.", source=DJL
    )
    cuda_graph_batch_sizes: tuple[int, ...] | None = unset(
        "Batches for which CUDA graphs are recorded.",
        **count("sequences"),
        example="1,2,4,8",
        default_note="chosen by the engine",
    )
    cuda_graph_max_batch_size: int | None = unset(
        "Largest batch for which a CUDA graph is recorded.", **count("sequences"), example="128", default_note="128"
    )
    cuda_graph_padding_enabled: bool = option(
        False, "Fill a batch up to the next recorded one.", aliases=("option.enable_padding",)
    )
    enable_autotuner: bool = option(True, "Choose kernels by trying them at start.")
    enable_min_latency: bool = option(False, "Prefer latency over throughput (Llama 4).")
    enable_iter_perf_stats: bool = option(
        True, "Gather statistics of iterations, for /metrics.", source=f"{TRTLLM}, with another default"
    )
    enable_iter_req_stats: bool = option(
        False, "Gather statistics of requests in every iteration; needs `option.enable_iter_perf_stats`."
    )
    print_iter_log: bool = option(False, "Log every iteration.")
    perf_metrics_max_requests: int = option(0, "Requests of which measurements are kept.", unit="requests", at_least=0)
    garbage_collection_gen0_threshold: int = option(
        20000, "New objects after which the engine process looks for garbage.", **count("objects")
    )
    checkpoint_format: str | None = unset("Format of the checkpoint.", example="HF", default_note="HF")
    enable_fullgraph: bool = option(
        True, "Compile the model as one graph; only with torch.compile.", aliases=("option.torch_compile_fullgraph",)
    )
    enable_inductor: bool = option(False, "Compile with torch's Inductor.")
    enable_piecewise_cuda_graph: bool = option(False, "Record CUDA graphs for pieces of the model.")
    disable_flashinfer_sampling: bool = option(False, "Sample without FlashInfer.")
    max_stats_len: int = option(1000, "Statistics that are kept until somebody reads them.", **count("entries"))
    iter_stats_max_iterations: int | None = unset(
        "Iterations of which statistics are kept.",
        unit="iterations",
        at_least=0,
        example="1000",
        default_note="the engine's own",
        source=DJL,
    )
    request_stats_max_iterations: int | None = unset(
        "Iterations of which statistics per request are kept.",
        unit="iterations",
        at_least=0,
        example="1000",
        default_note="the engine's own",
        source=DJL,
    )
    return_perf_metrics: bool = option(False, "Return the engine's timings with every request.")
    orchestrator_type: Orchestrator | None = unset(
        "How the ranks of the engine talk to each other.", example="rpc", default_note="MPI"
    )
    extra_llm_api_options: str | None = unset(
        "Arguments of TensorRT-LLM's LLM that have no option: a YAML file (in the model directory, or with its whole "
        "path), or JSON. docs/tensorrt-llm.md has the rules.",
        example='{"stream_interval": 4}',
    )

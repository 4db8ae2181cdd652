"""How a model is spread over GPUs and machines."""

from __future__ import annotations

from typing import Annotated, Literal

from djl_trtllm.config.options.choices import AllReduceStrategy, EmbeddingParallelMode
from djl_trtllm.config.options.documents import DJL, LMI, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option


class ParallelismOptions(OptionGroup):
    """Degrees of parallelism, and the communication between the parts."""

    tensor_parallel_degree: Annotated[
        int | Literal["max"],
        Option(
            "option.tensor_parallel_degree",
            "GPUs over which each layer is split; `max` takes all GPUs of the machine (divided by the pipeline "
            "parallel degree).",
            aliases=(
                "option.tensor_parallel_size",
                "option.tp_size",
                "option.tensor_parallelism",
                "option.tensor_parallel_count",
            ),
            unit="GPUs",
            at_least=1,
            source=LMI,
        ),
    ] = 1
    pipeline_parallel_degree: Annotated[
        int,
        Option(
            "option.pipeline_parallel_degree",
            "Groups of GPUs over which the layers are spread one after the other.",
            aliases=(
                "option.pipeline_parallel_size",
                "option.pp_size",
                "option.pipeline_parallelism",
                "option.pipeline_parallel_count",
            ),
            unit="groups",
            at_least=1,
            source=DJL,
        ),
    ] = 1
    context_parallel_size: Annotated[
        int,
        Option(
            "option.context_parallel_size",
            "GPUs over which one sequence is split.",
            unit="GPUs",
            at_least=1,
            source=DJL,
        ),
    ] = 1
    moe_tensor_parallel_size: Annotated[
        int | None,
        Option(
            "option.moe_tensor_parallel_size",
            "GPUs over which each expert of a mixture-of-experts model is split.",
            unit="GPUs",
            at_least=1,
            example="1",
            default_note="chosen by the engine",
            source=DJL,
        ),
    ] = None
    moe_expert_parallel_size: Annotated[
        int | None,
        Option(
            "option.moe_expert_parallel_size",
            "GPUs over which the experts are spread, each whole.",
            unit="GPUs",
            at_least=1,
            example="1",
            default_note="chosen by the engine",
            source=DJL,
        ),
    ] = None
    moe_cluster_parallel_size: Annotated[
        int | None,
        Option(
            "option.moe_cluster_parallel_size",
            "GPUs of one cluster that share an expert.",
            unit="GPUs",
            at_least=1,
            example="1",
            default_note="chosen by the engine",
            source=TRTLLM,
        ),
    ] = None
    enable_attention_dp: Annotated[
        bool,
        Option(
            "option.enable_attention_dp",
            "Give each GPU its own requests for attention, and split only the rest of the model.",
            source=DJL,
        ),
    ] = False
    enable_lm_head_tp_in_adp: Annotated[
        bool,
        Option(
            "option.enable_lm_head_tp_in_adp",
            "Split the output layer over the GPUs under attention data parallelism.",
            source=TRTLLM,
        ),
    ] = False
    embedding_parallel_mode: Annotated[
        EmbeddingParallelMode,
        Option(
            "option.embedding_parallel_mode",
            "How the embedding table is split over GPUs.",
            source=DJL,
        ),
    ] = EmbeddingParallelMode.VOCABULARY
    allreduce_strategy: Annotated[
        AllReduceStrategy,
        Option(
            "option.allreduce_strategy",
            "Kernel that adds up the parts of a layer over GPUs.",
            source=TRTLLM,
        ),
    ] = AllReduceStrategy.AUTO
    gpus_per_node: Annotated[
        int | None,
        Option(
            "option.gpus_per_node",
            "GPUs of one machine.",
            unit="GPUs",
            at_least=1,
            example="8",
            default_note="those of this machine",
            source=TRTLLM,
        ),
    ] = None
    num_nodes: Annotated[
        int,
        Option(
            "option.num_nodes",
            "Machines over which one model is spread. The server is started on the first, and trtllm-llmapi-launch "
            "starts the ranks on all of them.",
            unit="machines",
            at_least=1,
            source=TRITON,
        ),
    ] = 1
    cluster_size: Annotated[
        int,
        Option(
            "option.cluster_size",
            "Machines over which DJL Serving spreads one model (DJL_CLUSTER_SIZE); means what `option.num_nodes` does.",
            unit="machines",
            at_least=1,
            source=DJL,
        ),
    ] = 1

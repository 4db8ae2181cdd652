"""Keys of Triton model repositories and their launchers that have no other home."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.option import Option
from djl_trtllm.config.options.documents import TRITON
from djl_trtllm.config.options.group import OptionGroup


class TritonOptions(OptionGroup):
    """Accepted as they are; `effect` says what each does here."""

    decoupled: Annotated[
        bool,
        Option(
            "option.decoupled",
            "Let a Triton model answer a request more than once, which streaming needs.",
            aliases=("option.decoupled_mode",),
            effect="no effect: every model streams",
            source=TRITON,
        ),
    ] = False
    gpt_model_path: Annotated[
        str | None,
        Option(
            "option.gpt_model_path",
            "Folder of a compiled engine.",
            aliases=("option.engine_dir",),
            example="/models/tensorrt_llm/1",
            effect="no effect: name the engine by option.model_id, or put it beside serving.properties",
            source=TRITON,
        ),
    ] = None
    encoder_model_path: Annotated[
        str | None,
        Option(
            "option.encoder_model_path",
            "Folder of a compiled encoder.",
            aliases=("option.encoder_engine_dir",),
            example="/models/encoder/1",
            effect="no effect: encoder-decoder models are not served",
            source=TRITON,
        ),
    ] = None
    max_queue_size: Annotated[
        int,
        Option(
            "option.max_queue_size",
            "Requests Triton keeps waiting, 0 for any number.",
            unit="requests",
            at_least=0,
            effect="no effect: job_queue_size bounds the waiting queue",
            source=TRITON,
        ),
    ] = 0
    preprocessing_instance_count: Annotated[
        int,
        Option(
            "option.preprocessing_instance_count",
            "Tokenizing processes of a Triton repository.",
            unit="processes",
            at_least=1,
            effect="no effect: text and tokens are made in the server's process",
            source=TRITON,
        ),
    ] = 1
    postprocessing_instance_count: Annotated[
        int,
        Option(
            "option.postprocessing_instance_count",
            "Detokenizing processes of a Triton repository.",
            unit="processes",
            at_least=1,
            effect="no effect: text and tokens are made in the server's process",
            source=TRITON,
        ),
    ] = 1
    bls_instance_count: Annotated[
        int,
        Option(
            "option.bls_instance_count",
            "Business logic processes of a Triton repository.",
            unit="processes",
            at_least=1,
            effect="no effect: text and tokens are made in the server's process",
            source=TRITON,
        ),
    ] = 1
    tensorrt_llm_model_name: Annotated[
        str,
        Option(
            "option.tensorrt_llm_model_name",
            "Model that a Triton repository's business logic calls.",
            effect="no effect: there is one model",
            source=TRITON,
        ),
    ] = "tensorrt_llm"
    tensorrt_llm_draft_model_name: Annotated[
        str | None,
        Option(
            "option.tensorrt_llm_draft_model_name",
            "Draft model that a Triton repository's business logic calls.",
            example="tensorrt_llm_draft",
            effect="no effect: speculative decoding is not available yet",
            source=TRITON,
        ),
    ] = None
    multimodal_encoders_name: Annotated[
        str | None,
        Option(
            "option.multimodal_encoders_name",
            "Image encoder that a Triton repository's business logic calls.",
            example="multimodal_encoders",
            effect="no effect: images are not served",
            source=TRITON,
        ),
    ] = None
    multimodal_model_path: Annotated[
        str | None,
        Option(
            "option.multimodal_model_path",
            "Folder of a compiled image encoder.",
            example="/models/vision",
            effect="no effect: images are not served",
            source=TRITON,
        ),
    ] = None
    max_num_images: Annotated[
        int | None,
        Option(
            "option.max_num_images",
            "Most images of one request.",
            unit="images",
            at_least=0,
            example="1",
            effect="no effect: images are not served",
            source=TRITON,
        ),
    ] = None
    executor_worker_path: Annotated[
        str | None,
        Option(
            "option.executor_worker_path",
            "Program that Triton's backend starts for each rank.",
            example="/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
            retired="the engine process starts its own ranks",
            source=TRITON,
        ),
    ] = None
    encoder_input_features_data_type: Annotated[
        str | None,
        Option(
            "option.encoder_input_features_data_type",
            "Number format of an encoder's input.",
            example="TYPE_FP16",
            effect="no effect: encoder-decoder models are not served",
            source=TRITON,
        ),
    ] = None
    xgrammar_tokenizer_info_path: Annotated[
        str | None,
        Option(
            "option.xgrammar_tokenizer_info_path",
            "File with a tokenizer's description for xgrammar.",
            example="/models/xgrammar_tokenizer_info.json",
            retired="it is made from the model's own tokenizer",
            source=TRITON,
        ),
    ] = None
    output_dir: Annotated[
        str | None,
        Option(
            "option.output_dir",
            "Folder in which trtllm-build writes an engine.",
            example="/models/engine",
            retired="`djl-trtllm compile CHECKPOINT OUT` names it; otherwise engines are kept in "
            "option.engine_cache_dir",
            source=TRITON,
        ),
    ] = None
    model_repo: Annotated[
        str | None,
        Option(
            "option.model_repo",
            "Model repository of Triton's launcher.",
            example="/models",
            retired="give the model directory to `djl-trtllm serve`",
            source=TRITON,
        ),
    ] = None
    model_type: Annotated[
        str | None,
        Option(
            "option.model_type",
            "Folder of conversion scripts of a model's kind, such as llama.",
            example="llama",
            retired="it is read from the checkpoint's config.json",
            source=TRITON,
        ),
    ] = None

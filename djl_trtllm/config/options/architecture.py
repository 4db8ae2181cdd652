"""What the conversion scripts of early engines had to be told about a model."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.choices import BaichuanVersion, ChatGlmVersion, GptVersion, RotaryScaling
from djl_trtllm.config.option import Option
from djl_trtllm.config.options.documents import LMI
from djl_trtllm.config.options.group import OptionGroup


class ArchitectureOptions(OptionGroup):
    """Today all of it is read from the checkpoint's config.json."""

    baichuan_model_version: Annotated[
        BaichuanVersion,
        Option(
            "option.baichuan_model_version",
            "Which Baichuan model it is.",
            retired="today it is read from the checkpoint's config.json",
            source=LMI,
        ),
    ] = BaichuanVersion.V1_13B
    chatglm_model_version: Annotated[
        ChatGlmVersion,
        Option(
            "option.chatglm_model_version",
            "Which ChatGLM model it is; the document requires it for ChatGLM.",
            value_aliases={"chatglm3": "chatglm3_6b", "chatglm2": "chatglm2_6b", "chatglm": "chatglm_6b"},
            tensorrt="the last part of the path in LLM(model), by which TensorRT-LLM tells the version",
            pytorch="no effect: the checkpoint's config.json counts",
            openvino="no effect: the checkpoint's config.json counts",
            source=LMI,
        ),
    ] = ChatGlmVersion.UNSPECIFIED
    gpt_model_version: Annotated[
        GptVersion,
        Option(
            "option.gpt_model_version",
            "Which model of the GPT-2 family it is.",
            tensorrt="the last part of the path in LLM(model), by which TensorRT-LLM tells the version",
            pytorch="no effect: the checkpoint's config.json counts",
            openvino="no effect: the checkpoint's config.json counts",
            source=LMI,
        ),
    ] = GptVersion.GPT2
    rotary_base: Annotated[
        float,
        Option(
            "option.rotary_base",
            "Base of the rotary embedding, for Llama, InternLM and Qwen.",
            above=0,
            retired="rope_theta of the checkpoint's config.json counts; change it there",
            source=LMI,
        ),
    ] = 10000.0
    rotary_dim: Annotated[
        int,
        Option(
            "option.rotary_dim",
            "Dimensions of a head that are rotated, for GPT-J.",
            unit="dimensions",
            at_least=1,
            retired="rotary_dim of the checkpoint's config.json counts; change it there",
            source=LMI,
        ),
    ] = 64
    rotary_scaling_type: Annotated[
        RotaryScaling | None,
        Option(
            "option.rotary_scaling_type",
            "How the rotary embedding is stretched over longer contexts, for Llama, InternLM and Qwen.",
            example="linear",
            retired=(
                'rope_scaling of the checkpoint\'s config.json counts; write {"rope_type": TYPE, "factor": FACTOR} '
                "there"
            ),
            source=LMI,
        ),
    ] = None
    rotary_scaling_factor: Annotated[
        float | None,
        Option(
            "option.rotary_scaling_factor",
            "By how much the context is stretched.",
            above=1,
            example="2",
            retired=(
                'rope_scaling of the checkpoint\'s config.json counts; write {"rope_type": TYPE, "factor": FACTOR} '
                "there"
            ),
            source=LMI,
        ),
    ] = None

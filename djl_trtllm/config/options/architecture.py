"""Properties of a model that were arguments of early conversion scripts."""

from __future__ import annotations

from djl_trtllm.config.options.choices import ChatGlmVersion, GptVersion, RotaryScaling
from djl_trtllm.config.options.documents import LMI
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option

_OVERLAY = "{} in the copy of the checkpoint's config.json that the engine reads"


class ArchitectureOptions(OptionGroup):
    """Each of them is in the checkpoint's config.json today; the `rotary_*` options override it."""

    chatglm_model_version: ChatGlmVersion = option(
        ChatGlmVersion.UNSPECIFIED,
        "Which ChatGLM model it is; the document requires it for ChatGLM.",
        value_aliases={"chatglm3": "chatglm3_6b", "chatglm2": "chatglm2_6b", "chatglm": "chatglm_6b"},
        source=LMI,
    )
    gpt_model_version: GptVersion = option(GptVersion.GPT2, "Which model of the GPT-2 family it is.", source=LMI)
    rotary_base: float | None = option(
        None,
        "Base of the rotary embedding, for Llama, InternLM and Qwen.",
        above=0,
        example="10000",
        default_note="the checkpoint's own",
        effect=_OVERLAY.format("rope_theta"),
        source=LMI,
    )
    rotary_dim: int | None = option(
        None,
        "Dimensions of a head that are rotated, for GPT-J.",
        unit="dimensions",
        at_least=1,
        example="64",
        default_note="the checkpoint's own",
        effect=_OVERLAY.format("rotary_dim"),
        source=LMI,
    )
    rotary_scaling_type: RotaryScaling | None = option(
        None,
        "How the rotary embedding is stretched over longer contexts, for Llama, InternLM and Qwen.",
        example="linear",
        default_note="the checkpoint's own",
        effect=_OVERLAY.format("rope_scaling") + "; OpenVINO does not stretch `dynamic`",
        source=LMI,
    )
    rotary_scaling_factor: float | None = option(
        None,
        "By how much the context is stretched.",
        above=1,
        example="2",
        default_note="the checkpoint's own",
        effect=_OVERLAY.format("rope_scaling"),
        source=LMI,
    )

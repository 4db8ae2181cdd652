"""Properties of a model that the conversion scripts of early engines needed."""

from __future__ import annotations

from djl_trtllm.config.options.choices import ChatGlmVersion, GptVersion
from djl_trtllm.config.options.documents import LMI
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class ArchitectureOptions(OptionGroup):
    """Today all of it is read from the checkpoint's config.json."""

    chatglm_model_version: ChatGlmVersion = option(
        ChatGlmVersion.UNSPECIFIED,
        "Which ChatGLM model it is; the document requires it for ChatGLM.",
        value_aliases={"chatglm3": "chatglm3_6b", "chatglm2": "chatglm2_6b", "chatglm": "chatglm_6b"},
        source=LMI,
    )
    gpt_model_version: GptVersion = option(GptVersion.GPT2, "Which model of the GPT-2 family it is.", source=LMI)

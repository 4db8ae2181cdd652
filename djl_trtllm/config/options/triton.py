"""What only Triton's API and its model repositories have."""

from __future__ import annotations

from djl_trtllm.config.options.documents import TRITON
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class TritonOptions(OptionGroup):
    """Options of Triton's dialect; other dialects do not read them."""

    decoupled: bool | None = option(
        None,
        "Whether Triton's API streams: with `false` it refuses requests for streams, as Triton does. Other APIs stream "
        "in any case.",
        aliases=("option.decoupled_mode",),
        example="true",
        default_note="true",
        effect="streams of Triton's API",
        source=TRITON,
    )

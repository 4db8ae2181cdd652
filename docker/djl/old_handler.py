"""The old container's handlers by name, such as `option.entryPoint=djl_python.tensorrt_llm`: ours for DJL's mode."""

import sys

if "--async-mode" in sys.argv:
    from djl_trtllm.async_handler import *  # noqa: F403
else:
    from djl_trtllm.handler import *  # noqa: F403

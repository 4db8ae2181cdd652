"""What the log looks like and how it is written: formats, request ids, a queue that never blocks."""

from djl_trtllm.logs.context import RequestContext, current_request_id, of_request
from djl_trtllm.logs.setup import configure, mark_lines

__all__ = ["RequestContext", "configure", "current_request_id", "mark_lines", "of_request"]

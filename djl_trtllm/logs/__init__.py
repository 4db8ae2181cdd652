"""What the log looks like and how it is written: formats, request ids, a queue that never blocks."""

from djl_trtllm.logs.context import current_request_id, of_request, request_context
from djl_trtllm.logs.setup import configure, mark_lines

__all__ = ["configure", "current_request_id", "mark_lines", "of_request", "request_context"]

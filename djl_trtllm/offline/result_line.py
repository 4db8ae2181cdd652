"""Results as JSON lines, with the LMI schema's names."""

from __future__ import annotations

from typing import Any

from djl_trtllm.api.lmi.finish_reasons import FINISH_REASONS
from djl_trtllm.api.output import CollectedSequence, dump_line
from djl_trtllm.offline.prompt_file import Entry
from djl_trtllm.offline.result import OfflineResult
from djl_trtllm.request import FinishReason


def format_line(entry: Entry, result: OfflineResult) -> bytes:
    """`{"id", "prompt", "generated_text", "finish_reason", "tokens", "error"}` and a line end.

    `tokens` is the number of generated tokens. With `n` above 1 the best sequence comes first, and
    `best_of_sequences` holds the others. `error` is null, or why the prompt failed; the text is then what there is.
    """
    best, *others = result.sequences
    prompt = entry.request.prompt if result.prompt is None else result.prompt.text
    line: dict[str, Any] = {"id": entry.id, "prompt": prompt, **_shown(best)}
    if others:
        line["best_of_sequences"] = [_shown(other) for other in others]
    line["error"] = None if result.failure is None else str(result.failure)
    return dump_line(line) + b"\n"


def _shown(sequence: CollectedSequence) -> dict[str, Any]:
    finished = sequence.finished
    return {
        "generated_text": sequence.text,
        "finish_reason": FINISH_REASONS[FinishReason.ERROR if finished is None else finished.reason],
        "tokens": 0 if finished is None else finished.generated_tokens,
    }

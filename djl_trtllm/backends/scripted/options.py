"""What options do on the scripted executor, which has no engine."""

from __future__ import annotations

from djl_trtllm.backends.effects import SENT_TOGETHER, Derived, Effects, bounded

_LIMITS = ("max_input_len", "max_output_len", "max_seq_len", "max_rolling_batch_size", "max_num_sequences")

EFFECTS: Effects = bounded(
    {
        **dict.fromkeys(_LIMITS, Derived("limit at admission")),
        "max_num_tokens": Derived("raises lengths and batch; a script may have a bound for it"),
        "stream_interval": SENT_TOGETHER,
        "script": Derived("what the executor plays, as JSON"),
    }
)

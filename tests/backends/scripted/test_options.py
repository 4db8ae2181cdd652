from __future__ import annotations

from djl_trtllm.backends.effects import describe
from djl_trtllm.backends.scripted.options import EFFECTS
from djl_trtllm.config.options.registry import OPTIONS


def test_there_are_limits_and_a_script_and_nothing_else() -> None:
    limit = describe(OPTIONS["max_seq_len"], EFFECTS, "scripted")
    assert limit == "limit at admission, or less where model, engine or memory allow no more"
    assert describe(OPTIONS["script"], EFFECTS, "scripted") == "what the executor plays, as JSON"
    assert describe(OPTIONS["dtype"], EFFECTS, "scripted") == "no effect on scripted"

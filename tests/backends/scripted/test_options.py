from __future__ import annotations

from djl_trtllm.backends.effects import describe
from djl_trtllm.backends.scripted.options import EFFECTS
from djl_trtllm.config.options.registry import OPTIONS


def test_there_are_limits_an_interval_and_a_script_and_nothing_else() -> None:
    limit = describe(OPTIONS["max_seq_len"], EFFECTS, "scripted")
    assert limit == "limit at admission, or less where model, engine or memory allow no more"
    together = "the engine process sends the output of as many iterations together"
    assert describe(OPTIONS["stream_interval"], EFFECTS, "scripted") == together
    assert describe(OPTIONS["script"], EFFECTS, "scripted") == "what the executor plays, as JSON"
    assert describe(OPTIONS["dtype"], EFFECTS, "scripted") == "no effect on scripted"

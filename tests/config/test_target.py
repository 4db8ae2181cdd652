from __future__ import annotations

import pytest

from djl_trtllm.config.target import Effect, Target, named_targets, read_effect

LLM_SIZE = Target("LLM", "tensor_parallel_size")
DTYPE = Target("KvCacheConfig", "dtype")


def test_an_argument_is_shown_as_documents_write_it() -> None:
    assert (str(LLM_SIZE), str(DTYPE)) == ("LLM(tensor_parallel_size)", "KvCacheConfig.dtype")


@pytest.mark.parametrize(
    ("text", "effect"),
    [
        ("KvCacheConfig.dtype", Effect((DTYPE,))),
        ("LLM(tensor_parallel_size)", Effect((LLM_SIZE,))),
        ("KvCacheConfig.dtype and LLM(tensor_parallel_size)", Effect((DTYPE, LLM_SIZE))),
        ("KvCacheConfig.dtype, when set", Effect((DTYPE,), when_set=True)),
        ("KvCacheConfig.dtype and LLM(tensor_parallel_size), when set", Effect((DTYPE, LLM_SIZE), when_set=True)),
        ("KvCacheConfig.dtype, 0.95 when not set", None),
        ("no effect: KvCacheConfig.dtype", None),
        ("kv.dtype", None),
        ("", None),
    ],
)
def test_an_effect_of_arguments_alone_is_passed_as_it_is(text: str, effect: Effect | None) -> None:
    assert read_effect(text) == effect


def test_arguments_are_found_between_other_words() -> None:
    text = "KvCacheConfig.dtype, 0.95 when not set, and LLM(tensor_parallel_size) on one GPU; not xKvCacheConfig.x.y"
    assert named_targets(text) == (DTYPE, LLM_SIZE)
    assert named_targets("no effect: one GPU") == ()

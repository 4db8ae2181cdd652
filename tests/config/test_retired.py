from __future__ import annotations

import pytest

from djl_trtllm.config import Backend
from djl_trtllm.config.explain import without_effect
from djl_trtllm.config.registry import OPTIONS, DeclaredOption

from .helpers import from_text

RETIRED = [declared for declared in OPTIONS.values() if declared.option.retired]


@pytest.mark.parametrize("declared", RETIRED, ids=lambda declared: declared.name)
def test_an_old_name_is_accepted_and_answered_with_what_it_did_and_what_replaces_it(declared: DeclaredOption) -> None:
    config = from_text(f"{declared.key}={declared.example}")
    assert config.is_set(declared.name)
    (warning,) = [line for line in config.warnings if "has no effect any more" in line]
    assert warning.startswith(f"{declared.key}={declared.example} (serving.properties:1) has no effect any more (")
    assert declared.option.description[1:].removesuffix(".") in warning
    assert warning.endswith(f"): {declared.option.retired}")
    assert without_effect(config, Backend.TENSORRT) == ()


def test_what_early_engines_had_and_todays_have_not_is_retired() -> None:
    names = {declared.name for declared in RETIRED}
    assert names >= {
        "use_custom_all_reduce",
        "enable_trt_overlap",
        "baichuan_model_version",
        "rotary_base",
        "rotary_dim",
        "rotary_scaling_type",
        "rotary_scaling_factor",
        "multi_query_mode",
        "trtllm_checkpoint_path",
        "num_checkpoint_workers",
        "num_engine_workers",
        "load_by_shard",
        "auto_parallel",
    }


def test_a_wrong_value_of_an_old_name_is_still_an_error() -> None:
    from .helpers import problems_of

    (problem,) = problems_of("option.baichuan_model_version=v9")
    assert "one of v1_7b, v1_13b, v2_7b, v2_13b" in problem

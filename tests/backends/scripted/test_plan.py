from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import inspect
from tests.engines.helpers import CPU_ONLY, configured
from tests.support import executors


def test_the_script_is_what_the_executor_is_started_with(checkpoint: Path) -> None:
    plan = plan_engine(configured(backend="scripted", script='{"end_after": 3}'), inspect(checkpoint), CPU_ONLY)
    assert (plan.executor, plan.compiler) == (executors.SCRIPTED, None)
    assert plan.executor_options() == {"end_after": 3}


@pytest.mark.parametrize("script", ["{", "[]", "3"])
def test_a_script_is_a_json_object(checkpoint: Path, script: str) -> None:
    with pytest.raises(ConfigError, match=r"option\.script=.* \(environment variable OPTION_SCRIPT\): expected a JSON"):
        plan_engine(configured(backend="scripted", script=script), inspect(checkpoint), CPU_ONLY)


def test_a_script_that_bounds_max_num_tokens_is_given_it(checkpoint: Path) -> None:
    config = configured(backend="scripted", script='{"memory_tokens": 3}', max_num_tokens="5000")
    plan = plan_engine(config, inspect(checkpoint), CPU_ONLY)
    assert plan.executor_options() == {"memory_tokens": 3, "max_num_tokens": 5000}
    config = configured(backend="scripted", script="{}", max_num_tokens="5000")
    assert plan_engine(config, inspect(checkpoint), CPU_ONLY).executor_options() == {}
    config = configured(backend="scripted", script='{"memory_tokens": 3}')
    assert plan_engine(config, inspect(checkpoint), CPU_ONLY).executor_options() == {"memory_tokens": 3}

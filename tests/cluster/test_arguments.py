from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.cluster.arguments import ClusterArguments
from djl_trtllm.errors import ConfigError


def test_a_configuration_file_gives_values_and_serve_run_gives_texts() -> None:
    expected = ClusterArguments(model="/m", options={"option.dtype": "fp16"}, replicas=3, gpus=2, cpus=0.5, direct=True)
    options = {"option.dtype": "fp16"}
    file = {"model": "/m", "options": options, "replicas": 3, "gpus": 2, "cpus": 0.5, "direct": True}
    texts = {"model": "/m", "option.dtype": "fp16", "replicas": "3", "gpus": "2", "cpus": "0.5", "direct": "true"}
    assert ClusterArguments.parse(file) == ClusterArguments.parse(texts) == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"replica": 2}, "unknown field `replica`; there are model, options, name, replicas"),
        ({"replicas": 0}, "Expected `int` >= 1"),
        ({"replicas": "some"}, "Expected `int`"),
        ({"gpus": -1}, "Expected `int` >= 0"),
        ({"options": "dtype=fp16"}, "Expected `object`"),
        ({"replicas": 2, "autoscale": "1:4"}, "replicas and autoscale: leave one out"),
    ],
)
def test_what_is_wrong_with_an_argument_is_an_error_that_names_it(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        ClusterArguments.parse(given)
    assert problem in str(error.value)

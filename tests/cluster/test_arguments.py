from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.cluster.arguments import ClusterArguments, ModelArguments, Routing
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
        ({"replica": 2}, "unknown field `replica`; there are model, options, replicas, autoscale"),
        ({"replicas": 0}, "Expected `int` >= 1"),
        ({"replicas": "some"}, "Expected `int`"),
        ({"gpus": -1}, "Expected `int` >= 0"),
        ({"options": "dtype=fp16"}, "Expected `object`"),
        ({"replicas": 2, "autoscale": "1:4"}, "replicas and autoscale: leave one out"),
        ({"models": {"a": {"replicas": 2, "autoscale": "1:4"}}}, "replicas and autoscale: leave one out"),
        ({"models": {"a": {"replica": 2}}}, "unknown field `replica`"),
        ({"models": {"a": "/m"}}, "Expected `object`"),
        ({"models": {"a/b": {}}}, "Expected `str` matching regex"),
        ({"models": {"gateway": {}}}, "a model named gateway, the name of what routes"),
        (
            {"models": {"a": {}}, "model": "/m", "replicas": 2},
            "models and model, replicas: give each of the models its own",
        ),
        ({"models": {"a": {}}, "routing": "direct"}, "models and routing=direct"),
        ({"routing": "random"}, "Invalid enum value 'random'"),
        ({"gateways": 0}, "Expected `int` >= 1"),
    ],
)
def test_what_is_wrong_with_an_argument_is_an_error_that_names_it(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        ClusterArguments.parse(given)
    assert problem in str(error.value)


def test_several_models_have_their_names_and_arguments_of_their_own() -> None:
    first = {"model": "/a", "replicas": 2, "option.dtype": "fp16"}
    made = ClusterArguments.parse({"models": {"a": first, "b": {"model": "/b", "autoscale": "1:4", "cpus": 0.5}}})
    assert made.deployments == {
        "a": ModelArguments(model="/a", replicas=2, options={"model_name": "a", "option.dtype": "fp16"}),
        "b": ModelArguments(model="/b", autoscale="1:4", cpus=0.5, options={"model_name": "b"}),
    }


def test_requests_for_one_of_several_models_are_routed_by_prefix_and_those_for_one_directly() -> None:
    assert ClusterArguments().path is Routing.DIRECT
    assert ClusterArguments(models={"a": ModelArguments()}).path is Routing.PREFIX
    assert ClusterArguments(routing=Routing.LOAD).path is Routing.LOAD


def test_cpus_are_those_of_all_replicas_and_gateways() -> None:
    assert ClusterArguments(replicas=3, cpus=2).cpus_at_most == 6
    assert ClusterArguments(replicas=3, cpus=2, routing=Routing.PREFIX, gateways=2).cpus_at_most == 8
    models = {"a": ModelArguments(replicas=2, cpus=0.2), "b": ModelArguments(autoscale="1:4", cpus=1)}
    assert ClusterArguments(models=models).cpus_at_most == pytest.approx(0.4 + 4 + 0.2)

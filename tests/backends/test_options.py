"""The option maps of all backends."""

from __future__ import annotations

import pytest

from djl_trtllm.backends.options import automatic_backends, describe, deviations, option_maps, with_effects
from djl_trtllm.config import Backend
from djl_trtllm.config.options.registry import OPTIONS
from tests.config.helpers import from_text


def test_every_backend_has_a_map() -> None:
    assert set(option_maps()) == set(Backend) - {Backend.AUTO}


@pytest.mark.parametrize("backend", option_maps())
def test_a_map_names_options_whose_effect_depends_on_the_backend(backend: Backend) -> None:
    assert [
        name for name in option_maps()[backend] if name not in OPTIONS or OPTIONS[name].option.effect_everywhere
    ] == []


def test_an_option_has_an_effect_somewhere() -> None:
    mapped = {name for effects in option_maps().values() for name in effects}
    assert [
        name for name, declared in OPTIONS.items() if not declared.option.effect_everywhere and name not in mapped
    ] == []


def test_auto_names_the_backends_that_it_chooses_from() -> None:
    text = describe(OPTIONS["max_num_tokens"], Backend.AUTO)
    assert text == "; ".join(f"{one}: {describe(OPTIONS['max_num_tokens'], one)}" for one in automatic_backends())
    assert text.startswith("tensorrt: BuildConfig.max_num_tokens and LLM(max_num_tokens); pytorch: ")
    assert describe(OPTIONS["strict"], Backend.AUTO) == OPTIONS["strict"].option.effect


def test_autodeploy_has_the_options_of_the_pytorch_backend() -> None:
    assert option_maps()[Backend.AUTODEPLOY] is option_maps()[Backend.PYTORCH]


def test_what_has_no_effect_depends_on_the_backend() -> None:
    config = from_text("option.tokens_per_block=128")
    (line,) = deviations(config, Backend.OPENVINO)
    assert line == "option.tokens_per_block = 128 tokens (serving.properties:1): always 32: OpenVINO's block size"
    assert deviations(config, Backend.TENSORRT) == ()


CONTRADICTED = {
    "batch_scheduler_policy": "static_batch",
    "max_attention_window": "8",
    "max_num_tokens": "512\noption.max_input_len=2048",
}


@pytest.mark.parametrize("name", CONTRADICTED)
def test_no_warning_says_what_the_backend_does_not_do(name: str) -> None:
    config = from_text(f"option.{name}={CONTRADICTED[name]}")
    assert len(with_effects(config, Backend.TENSORRT).warnings) == 1
    on_openvino = with_effects(config, Backend.OPENVINO)
    assert on_openvino.warnings == ()
    assert len(on_openvino.notes) == (name != "max_num_tokens")


def test_options_that_djl_serving_reads_have_their_effect_there() -> None:
    config = from_text("option.async_mode=true\nminWorkers=1\noption.task=text-generation")
    assert [line.split()[0] for line in deviations(config, Backend.OPENVINO)] == [
        "option.task",
        "option.async_mode",
        "minWorkers",
    ]
    assert [line.split()[0] for line in deviations(config, Backend.OPENVINO, under_djl=True)] == ["option.task"]
    for backend in (Backend.AUTO, Backend.OPENVINO):
        assert describe(OPTIONS["async_mode"], backend, under_djl=True) == "DJL Serving's async mode"
        assert describe(OPTIONS["min_workers"], backend, under_djl=True) == "read by DJL Serving"
        assert describe(OPTIONS["async_mode"], backend).startswith("no effect: under DJL Serving")
        assert describe(OPTIONS["task"], backend, under_djl=True).startswith("no effect: ")

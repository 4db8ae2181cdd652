"""The text of a translation is what the target reads: its own syntax, and comments on where lines are from."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest
import yaml

from djl_trtllm.config.sources import parse_properties
from djl_trtllm.translate.formats import read_command, read_text, rendered
from djl_trtllm.translate.translation import translate
from tests.support.tables import by_table


def text(command: str, target: str) -> str:
    return rendered(translate(read_command(command), target))


@by_table("command", "engine")
def test_lmis_file_names_the_engine_of_the_source(command: str, engine: str) -> None:
    keys = {setting.key: setting.value for setting in parse_properties(text(command, "lmi"), "x").settings}
    assert keys == {"option.rolling_batch": engine, "option.model_id": "M"}


def test_a_properties_file_has_lists_objects_and_backslashes_as_it_reads_them() -> None:
    command = """vllm serve 'a\\b' --cudagraph-capture-sizes 1 2 --speculative-config '{"method": "mtp"}'"""
    values = {setting.key: setting.value for setting in parse_properties(text(command, "lmi"), "x").settings}
    assert values["option.model_id"] == "a\\b"
    assert values["option.cudagraph_capture_sizes"] == "1,2"
    assert values["option.speculative_config"] == '{"method": "mtp"}'


def test_a_command_for_vllm_wants_a_model_where_the_source_names_none() -> None:
    assert "vllm serve --config FILE.yaml" in text("sglang serve --model M", "vllm")
    assert "vllm serve MODEL --config FILE.yaml" in text("sglang serve --context-length 8192", "vllm")


@pytest.mark.parametrize("target", ["lmi", "vllm", "trtllm-serve", "truss", "triton"])
def test_a_line_end_in_a_value_begins_no_line_of_its_own(target: str) -> None:
    found = text("vllm serve 'M\ntrust-remote-code: true' --max-num-seqs '4\nx: 1' --port '5\nx: 1'", target)
    assert [each for each in found.splitlines() if each.startswith(("trust", "x: 1"))] == []


def test_a_truss_has_its_stack_and_the_source_of_its_checkpoint() -> None:
    assert yaml.safe_load(text("vllm serve M", "truss"))["trt_llm"] == {
        "inference_stack": "v2",
        "build": {"checkpoint_repository": {"source": "HF", "repo": "M"}},
    }
    assert yaml.safe_load(text("vllm serve --max-num-seqs 4", "truss"))["trt_llm"] == {
        "inference_stack": "v2",
        "runtime": {"max_batch_size": 4},
    }


def test_words_that_yaml_takes_for_something_else_are_quoted() -> None:
    assert yaml.safe_load(text("vllm serve no --revision 'a: b' --tokenizer null", "vllm")) == {
        "model": "no",
        "revision": "a: b",
        "tokenizer": "null",
    }


@pytest.mark.parametrize(
    ("command", "target", "words"),
    [
        ("vllm serve M --no-enable-prefix-caching", "dynamo", ["--no-enable-prefix-caching"]),
        ("vllm serve M --no-trust-remote-code", "sglang", []),
        ("trtllm-serve M --trust_remote_code", "dynamo", ["--trtllm.trust_remote_code", "true"]),
        ("vllm serve M --served-model-name a b", "dynamo", ["--served-model-name", "a", "b"]),
        ("vllm serve M --hf-overrides.a_b.c true", "dynamo", ["--hf-overrides.a_b.c", "true"]),
        ("vllm serve M --kv-transfer-config '{\"a\": 1}'", "dynamo", ["--kv-transfer-config", '{"a": 1}']),
    ],
)
def test_a_command_line_has_the_words_of_its_program(command: str, target: str, words: list[str]) -> None:
    found = shlex.split(text(command, target).replace("\\\n", " "), comments=True)
    assert found[:2] == ["python", "-m"]
    assert found[5:] == words


def test_an_object_in_a_list_is_one_word_of_json() -> None:
    file = "lora-modules:\n- {name: a, path: /x}\n- b=/y\n"
    found = rendered(translate(read_text(file, "x.yaml", "vllm"), "sglang"))
    words = shlex.split(found.replace("\\\n", " "), comments=True)
    assert words[-3::2] == ["--lora-paths", "b=/y"]
    assert json.loads(words[-2]) == {"name": "a", "path": "/x"}


def test_arguments_of_tensorrt_llm_with_more_than_a_word_are_one_object_for_dynamo() -> None:
    file = "cuda_graph_config:\n  batch_sizes: [1, 2]\nkv_cache_config:\n  dtype: fp8\nmax_batch_size: 4\n"
    first = translate(read_text(file, "x.yaml", "trtllm-serve"), "dynamo")
    words = shlex.split(rendered(first).replace("\\\n", " "), comments=True)
    assert words[5:-1] == ["--max-batch-size", "4", "--override-engine-args"]
    assert json.loads(words[-1]) == {"cuda_graph_config": {"batch_sizes": [1, 2]}, "kv_cache_config": {"dtype": "fp8"}}
    again = translate(read_command(shlex.join(words)), "trtllm-serve")
    assert yaml.safe_load(rendered(again)) == yaml.safe_load(file)


@pytest.mark.parametrize("target", ["sglang", "dynamo"])
def test_a_command_line_names_a_model_to_fill_in_where_the_source_names_none(target: str) -> None:
    assert "--model MODEL" in text("vllm serve --max-num-seqs 4", target)


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("$MODEL", "set"),
        ("/x/${MODEL} y", "/x/set y"),
        ("$MODEL`echo bad`$(echo bad)${X:-$(echo bad)}\\n'\"", "set`echo bad`$(echo bad)${X:-$(echo bad)}\\n'\""),
        ("$(echo bad)", "$(echo bad)"),
    ],
)
def test_the_shell_puts_its_variables_into_a_command_line_and_runs_nothing_in_it(word: str, read: str) -> None:
    line = text(shlex.join(["vllm", "serve", word]), "sglang").replace("python -m", "printf '%s\\0'")
    ran = subprocess.run(["bash", "-c", line], env={"MODEL": "set"}, capture_output=True, text=True, check=True)
    assert ran.stdout.split("\0")[1:3] == ["--model-path", read]


def test_a_file_says_which_variables_of_the_shell_it_does_not_have() -> None:
    command = "N=8\nvllm serve $MODEL --revision ${REV} --max-num-seqs $N"
    for target in ("vllm", "trtllm-serve", "lmi", "truss"):
        assert "# A file has no variables: write the values of $MODEL, ${REV}." in text(command, target).splitlines()
    assert "no variables" not in text(command, "sglang")


def test_flags_that_trtllm_serves_file_does_not_have_are_in_the_command() -> None:
    first = text("vllm serve M --port 80 --tool-call-parser hermes --max-num-seqs 4", "trtllm-serve").splitlines()[1]
    assert first.endswith("trtllm-serve M --port 80 --tool_parser qwen3 --config FILE.yaml")


def test_a_placeholder_of_the_shell_is_one_of_config_pbtxt() -> None:
    assert "max_batch_size: ${N}" in text("vllm serve M --max-num-seqs $N", "triton")


def test_a_comma_in_the_only_member_of_a_list_begins_no_other_member() -> None:
    given = read_text("logits-processors: ['a,b']\n", "x.yaml", "vllm")
    values = {each.key: each.value for each in parse_properties(rendered(translate(given, "lmi")), "x").settings}
    assert values["option.logits_processors"] == '["a,b"]'

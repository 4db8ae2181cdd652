"""What settings of one engine become in another, and that LMI's come back from vLLM as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from djl_trtllm.config.options import OPTIONS, DeclaredOption
from djl_trtllm.config.options.option import as_text
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.files import read_table
from djl_trtllm.translate.formats import read, read_command, read_text, rendered
from djl_trtllm.translate.translation import (
    ENGINES,
    REPLACED,
    ROWS,
    TITLES,
    WORKERS,
    Line,
    explained,
    name_in,
    names_of,
    row_of,
    translate,
)
from tests.support.tables import by_rows, by_table


def line(command: str, target: str, place: int = -1) -> Line:
    return translate(read_command(command), target).lines[place]


@by_rows(
    ("command", "target", "name", "value"),
    [
        ("vllm serve M --max-model-len 8k", "trtllm-serve", "max_seq_len", 8000),
        ("vllm serve M --max-model-len=8K", "sglang", "context_length", 8192),
        ("vllm serve M --no-enable-prefix-caching", "sglang", "disable_radix_cache", True),
        ("sglang serve --model M --disable-radix-cache", "vllm", "enable_prefix_caching", False),
        ("sglang serve --model M --tensor-parallel-size 2", "lmi", "option.tensor_parallel_degree", 2),
        ("vllm serve M --dtype half", "lmi", "option.dtype", "fp16"),
        ("vllm serve M --kv-cache-dtype fp8_e4m3", "sglang", "kv_cache_dtype", "fp8_e4m3"),
        ("vllm serve M --kv-cache-dtype fp8_e5m2", "lmi", "option.kv_cache_dtype", "fp8_e5m2"),
        ("vllm serve M --enforce-eager", "trtllm-serve", "cuda_graph_config", None),
        ("vllm serve M --cudagraph-capture-sizes 1 2 4", "trtllm-serve", "cuda_graph_config.batch_sizes", [1, 2, 4]),
        ("vllm serve M --speculative-config.method ngram", "trtllm-serve", "speculative_config.decoding_type", "NGram"),
        ("vllm serve M --seed 3", "lmi", "option.seed", 3),
        ("OPTION_SEED=3", "vllm", "seed", 3),
        ("vllm serve M --max-model-len 2.5k", "lmi", "option.max_model_len", 2500),
        ("vllm serve M --max-num-batched-tokens 1m", "lmi", "option.max_num_batched_tokens", 1_000_000),
        ("vllm serve M --max-num-batched-tokens 1M", "lmi", "option.max_num_batched_tokens", 1 << 20),
        ("vllm serve M --kv-offloading-size 2", "trtllm-serve", "kv_cache_config.host_cache_size", 2 << 30),
        ("vllm serve M --kv-offloading-size 4.5", "trtllm-serve", "kv_cache_config.host_cache_size", 9 << 29),
        ("OPTION_HOST_CACHE_SIZE=1073741824", "vllm", "kv_offloading_size", 1),
        ("python -m dynamo.sglang --model M --host H", "vllm", "host", "H"),
        ("vllm serve M --gpu-memory-util 0.8", "lmi", "option.gpu_memory_utilization", 0.8),
        ("trtllm-serve M --kv_cache_free_gpu_memory_fraction 0.7", "triton", "kv_cache_free_gpu_mem_fraction", 0.7),
        ("trtllm-serve M --trust_remote_code true", "vllm", "trust_remote_code", True),
        ("OPTION_MAX_ROLLING_BATCH_SIZE=8", "dynamo", "max_batch_size", 8),
        ("python -m dynamo.trtllm --model M --trtllm.max_num_tokens 4", "vllm", "max_num_batched_tokens", 4),
        ("python -m dynamo.vllm --model M --max-num-seqs 4", "sglang", "max_running_requests", 4),
        ("python -m dynamo.sglang --model M --tp 2", "vllm", "tensor_parallel_size", 2),
        ("python -m dynamo.trtllm --model-path M", "vllm", "model", "M"),
        ("python -m dynamo.trtllm --free-gpu-memory-fraction 0.8", "lmi", "option.kv_cache_free_gpu_mem_fraction", 0.8),
        ("python -m dynamo.trtllm --kv-block-size 32", "sglang", "page_size", 32),
        ("trtllm-serve M --config=x --attn_backend TRTLLM", "dynamo", "trtllm.attn_backend", "TRTLLM"),
        ("vllm serve M \\\r\n --seed 3\r\n", "lmi", "option.seed", 3),
        (
            """python -m dynamo.trtllm --override-engine-args '{"kv_cache_config": {"dtype": "fp8"}}'""",
            "trtllm-serve",
            "kv_cache_config.dtype",
            "fp8",
        ),
        ("vllm serve M --max-num-seqs 8;", "sglang", "max_running_requests", 8),
        ("trtllm-serve M --tp_size 2", "dynamo", "tensor_parallel_size", 2),
        ("trtllm-serve M --served_model_name a", "dynamo", "served_model_name", "a"),
        ("python -m dynamo.vllm --model M -tp 2", "vllm", "tensor_parallel_size", 2),
        ("python -m dynamo.vllm --model M --namespace N", "dynamo", "namespace", "N"),
        ("trtllm-serve M --max_input_len 2", "truss", "trt_llm.runtime.patch_kwargs.max_input_len", 2),
        ("vllm serve M --served-model-name a b", "sglang", "served_model_name", "a"),
        ("vllm serve M --served-model-name c --served-model-name a b", "sglang", "served_model_name", "a"),
        ("vllm serve M -O3", "vllm", "optimization_level", 3),
        ("vllm serve M -O 3", "dynamo", "optimization_level", 3),
        ("vllm serve M --max-model-len auto", "vllm", "max_model_len", "auto"),
        ("vllm serve M --cudagraph-capture-sizes 1 2", "lmi", "option.cudagraph_capture_sizes", [1, 2]),
        ("sglang serve --attention-backend trtllm_mla", "dynamo", "attention_backend", "trtllm_mla"),
        ("vllm serve M --load-format bitsandbytes", "lmi", "option.load_format", "bitsandbytes"),
        ("export N=8\nvllm serve M --max-num-seqs $N", "sglang", "max_running_requests", 8),
        ("docker run vllm/vllm-openai vllm serve M", "sglang", "model_path", "M"),
        ("sglang serve --quantization $Q", "vllm", "quantization", "$Q"),
        ("vllm serve M --max-num-seqs ${UNSET}", "sglang", "max_running_requests", "${UNSET}"),
    ],
)
def test_a_setting_becomes_that_of_the_target(command: str, target: str, name: str, value: Any) -> None:
    found = line(command, target)
    assert (found.name, found.value) == (name, value)


def test_the_json_of_a_setting_says_where_it_came_from_and_what_became_of_it() -> None:
    found = json.loads(json.dumps(line("vllm serve M --max-num-seqs 4", "lmi").as_json()))
    assert found.keys() == {"written", "origin", "exactness", "name", "value", "row", "reason"}


@by_table("command", "target", "exactness", "says")
def test_what_is_not_the_same_says_why(command: str, target: str, exactness: str, says: str) -> None:
    found = line(command, target)
    assert found.exactness == exactness
    assert says in found.reason
    assert bool(found.reason) == (exactness != "same")


def test_a_secret_is_in_no_text() -> None:
    for command in ("vllm serve M --api-key SECRET-WORD", "HF_TOKEN=SECRET-WORD vllm serve M --hf-token SECRET-WORD"):
        for target in TITLES:
            assert "SECRET-WORD" not in rendered(translate(read_command(command), target))


def test_what_tunes_a_lost_method_is_lost_too() -> None:
    command = """vllm serve M --speculative-config '{"method": "suffix", "num_speculative_tokens": 3, "model": "D"}'"""
    found = translate(read_command(command), "trtllm-serve")
    assert [each.name for each in found.kept] == ["model"]
    assert len(found.lost) == 3


def test_of_two_settings_of_one_name_the_exact_one_is_written_and_the_other_reported() -> None:
    text = "option.max_num_sequences=4\noption.max_rolling_batch_size=8\n"
    found = translate(read_text(text, "serving.properties"), "vllm")
    assert [(each.name, each.value) for each in found.kept] == [("max_num_seqs", 8)]
    assert [each.written for each in found.lost] == ["option.max_num_sequences=4"]


def test_a_compiled_engine_is_no_checkpoint_of_another_engine() -> None:
    text = 'parameters { key: "gpt_model_path" value: { string_value: "/engines/7b" } }'
    read = read_text(text, "config.pbtxt")
    assert translate(read, "trtllm-serve").kept == ()
    assert translate(read, "lmi").kept[0].name == "option.model_id"
    assert translate(read, "triton").kept[0].name == "gpt_model_path"


@by_table("command", "worker")
def test_dynamos_worker_is_that_of_the_engine_of_the_source(command: str, worker: str) -> None:
    assert translate(read_command(command), "dynamo").target == worker


@pytest.mark.parametrize("text", ["ls -l", "'", "", "model: a\nport: 1\n"])
def test_what_is_of_no_engine_is_refused(text: str) -> None:
    with pytest.raises(DjlTrtllmError):
        read_text(text, "x.yaml" if ":" in text else "x.sh")


@pytest.mark.parametrize("name", ["x.sh", "x.yaml", "config.yaml", "config.pbtxt", "serving.properties"])
def test_a_file_with_a_nul_is_no_text(name: str) -> None:
    with pytest.raises(DjlTrtllmError, match=f"^{name}: .*NUL"):
        read_text("vllm serve M\0", name)


@by_rows(("name", "text"), [("config.pbtxt", 'name: "m"\nbackend = 3\n'), ("x.yaml", "a: 1\n b: 2\n")])
def test_a_file_is_refused_by_the_line_that_is_wrong(name: str, text: str) -> None:
    with pytest.raises(DjlTrtllmError, match=f"^{name}:2: "):
        read_text(text, name)


@pytest.mark.parametrize(("model", "lost"), [("tensorrt_llm", False), ("preprocessing", True), ("ensemble", True)])
def test_of_the_models_of_triton_the_engine_alone_has_its_batch(model: str, lost: bool) -> None:
    (found,) = translate(read_text("max_batch_size: 8\n", f"{model}/config.pbtxt"), "vllm").lines
    assert (found.exactness == "lost", "tensorrt_llm/config.pbtxt" in found.reason) == (lost, lost)


def test_what_a_truss_passes_on_has_the_names_of_tensorrt_llm() -> None:
    text = "trt_llm:\n  runtime:\n    patch_kwargs:\n      guided_decoding_backend: xgrammar\n"
    more = "      cuda_graph_config:\n        batch_sizes: [1, 2, 4]\n      enable_trtllm_sampler: true\n"
    read = read_text(text + more, "config.yaml")
    for target, *names in (
        ("trtllm-serve", "guided_decoding_backend", "cuda_graph_config.batch_sizes"),
        ("lmi", "option.guided_decoding_backend", "option.cuda_graph_batch_sizes"),
        ("sglang", "grammar_backend", "cuda_graph_bs_decode"),
    ):
        found = translate(read, target)
        assert [(each.name, each.value) for each in found.kept] == list(
            zip(names, ("xgrammar", [1, 2, 4]), strict=True)
        )
        assert "sampler_type" in found.lost[0].reason
    assert {each.exactness for each in translate(read, "truss").kept} == {"same"}


def test_a_yaml_file_is_of_the_engine_that_has_most_of_its_names_unless_that_is_said() -> None:
    text = "max-model-len: 8\nmax-num-seqs: 4\n"
    assert read_text(text, "x.yaml").source == "vllm"
    assert read_text("kv_cache_config:\n  dtype: fp8\n", "x.yml").source == "trtllm-serve"
    assert read_text("tp-size: 8\n", "x.yml", "sglang").source == "sglang"


SCRIPT = """#!/bin/bash
# vllm serve other, which doesn't count
export HF_HOME=/cache
vllm serve M \\
  --max-num-seqs 8 --speculative-config '{"method": "ngram",
  "num_speculative_tokens": 3}'  # a comment
echo done
"""


def test_an_empty_object_is_not_null() -> None:
    """TensorRT-LLM takes its defaults for CUDA graphs for `{}`, and none for null."""
    read = [read_text(f"cuda_graph_config: {value}\n", "x.yaml", "trtllm-serve") for value in ("null", "{}")]
    null, empty = (translate(each, "vllm").lines[0] for each in read)
    assert (null.name, null.value) == ("enforce_eager", True)
    assert empty.exactness == "lost"


def test_of_a_script_the_engines_command_is_read_and_the_others_are_reported() -> None:
    found = translate(read_text(SCRIPT, "start.sh"), "vllm")
    assert [(each.name, each.value) for each in found.kept] == [
        ("model", "M"),
        ("max_num_seqs", 8),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 3}),
    ]
    assert [each.written for each in found.lost] == ["HF_HOME=/cache", "echo done"]


def test_an_escaped_quote_begins_no_text() -> None:
    found = translate(read_text("echo don\\'t\nvllm serve M\necho 'it is'", "x.sh"), "vllm")
    assert [each.written for each in found.lines] == ["echo don't", "model=M", "echo it is"]


def test_text_without_its_end_is_refused_before_it_is_read_again_from_each_quote() -> None:
    with pytest.raises(DjlTrtllmError, match="no command line"):
        read_text('vllm serve "' + '\\"' * 100_000, "x.sh")


def test_a_file_that_a_command_line_names_is_read_with_it(tmp_path: Path) -> None:
    path = tmp_path / "extra.yaml"
    path.write_text("kv_cache_config:\n  dtype: fp8\n")
    found = line(f"trtllm-serve M --config {path}", "vllm", 0)
    assert (found.name, found.value, str(found.origin)) == ("kv_cache_dtype", "fp8", f"{path}:2")
    script = tmp_path / "again.sh"
    script.write_text(f"vllm serve M --config {script}\n")
    assert "translate it too" in translate(read_command(script.read_text()), "lmi").lines[-1].reason


def test_a_file_of_tensorrt_llm_that_a_worker_of_dynamo_takes_is_read_with_it(tmp_path: Path) -> None:
    path = tmp_path / "extra.yaml"
    path.write_text("kv_cache_config:\n  dtype: fp8\n")
    found = line(f"python -m dynamo.trtllm --model M --extra-engine-args {path}", "vllm", 0)
    assert (found.name, found.value, str(found.origin)) == ("kv_cache_dtype", "fp8", f"{path}:2")


def test_a_field_of_an_object_that_is_set_as_a_whole_has_no_line_of_its_own() -> None:
    found = translate(read_command("vllm serve M --cudagraph-capture-sizes 1 2 --enforce-eager"), "trtllm-serve")
    assert [(each.name, each.value) for each in found.kept[1:]] == [("cuda_graph_config", None)]
    assert found.lost[0].reason == "--enforce-eager sets cuda_graph_config"
    assert yaml.safe_load(rendered(found)) == {"cuda_graph_config": None}


@pytest.mark.parametrize("command", ["vllm serve M {} --max-num-seqs 8", "vllm serve M --max-num-seqs 8 {}"])
def test_a_flag_wins_over_the_file_that_the_command_line_names(command: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("max-num-seqs: 4\nmodel: N\n")
    found = translate(read_command(command.format(f"--config {path}")), "sglang")
    assert {each.name: each.value for each in found.kept} == {"model_path": "M", "max_running_requests": 8}
    assert [str(each.origin) for each in found.lost] == [f"{path}:1", f"{path}:2"]


def test_of_the_names_of_a_truss_the_one_that_clients_use_counts() -> None:
    text = "trt_llm:\n  runtime:\n    served_model_name: seen\nmodel_name: truss\n"
    found = translate(read_text(text, "config.yaml"), "vllm")
    assert [(each.name, each.value) for each in found.kept] == [("served_model_name", "seen")]


def test_a_name_that_triton_has_not_is_lost_with_its_place() -> None:
    text = 'name: "m"\nparameters { key: "gpt_model_path" value: { string_value: "/e" } }\n'
    text += 'parameters { key: "nonsense" value: { string_value: "1" } }\n'
    found = translate(read_text(text, "config.pbtxt"), "vllm").lost[-1]
    assert (found.written, str(found.origin)) == ("nonsense", "config.pbtxt:3")
    assert "not a setting of Triton" in found.reason


def test_each_variable_before_the_program_is_reported_wherever_its_command_stands() -> None:
    found = translate(read_command("cd /x\nHF_HOME=/x\nVLLM_USE_V1=1 vllm serve M"), "sglang")
    assert [each.written for each in found.lost] == ["HF_HOME=/x", "VLLM_USE_V1=1", "cd /x"]


def test_a_flag_that_is_repeated_with_its_value_is_one_line() -> None:
    found = translate(read_command("vllm serve M --max-num-seqs 8 --max-num-seqs 8"), "sglang")
    assert ([each.value for each in found.kept], found.lost) == (["M", 8], ())


def test_an_object_without_end_is_text() -> None:
    deep = "[" * 100_000
    assert line(f"vllm serve M --hf-overrides '{deep}'", "vllm").value == deep


def test_a_variable_with_a_secret_is_not_put_in() -> None:
    found = rendered(translate(read_command("HF_TOKEN=SECRET-WORD; vllm serve M --revision $HF_TOKEN"), "sglang"))
    assert "SECRET-WORD" not in found


def test_numbers_in_objects_stay_numbers_between_files_and_text() -> None:
    text = "kv-transfer-config:\n  kv_role: kv_both\n  kv_buffer_size: 1.5\n  kv_rank: 0\n"
    found = translate(read_text(text, "x.yaml", "vllm"), "lmi")
    assert found.kept[0].value == {"kv_role": "kv_both", "kv_buffer_size": 1.5, "kv_rank": 0}


def test_the_fields_of_an_object_keep_their_lists_and_their_objects() -> None:
    text = "compilation_config:\n  cudagraph_capture_sizes: [1, 2, 4]\n  pass_config: {fuse_norm_quant: true}\n"
    (found,) = translate(read_text(text, "x.yaml", "vllm"), "lmi").lines
    assert found.value == {"cudagraph_capture_sizes": [1, 2, 4], "pass_config": {"fuse_norm_quant": True}}
    assert str(found.origin) == "x.yaml:2"


@pytest.mark.parametrize(
    ("text", "source", "target", "name", "value"),
    [
        ("lora_config:\n  lora_dir: [/a]\n", "trtllm-serve", "trtllm-serve", "lora_config.lora_dir", ["/a"]),
        ("served-model-name: [a]\n", "vllm", "vllm", "served_model_name", ["a"]),
        ("served-model-name: [a]\n", "vllm", "sglang", "served_model_name", "a"),
        ("lora-modules: []\n", "vllm", "vllm", "lora_modules", []),
        ("cuda_graph_config:\n  batch_sizes: [4]\n", "trtllm-serve", "lmi", "option.cuda_graph_batch_sizes", [4]),
        ("gc_threshold: [7, '8']\n", "sglang", "dynamo", "gc_threshold", [7, "8"]),
        ("middleware: m\n", "vllm", "vllm", "middleware", ["m"]),
        ("lora-modules: a=/x\n", "vllm", "vllm", "lora_modules", ["a=/x"]),
        ("served-model-name: a\n", "vllm", "vllm", "served_model_name", "a"),
        ("served-model-name: 1.0\n", "vllm", "sglang", "served_model_name", "1.0"),
        ("no-enable-prefix-caching: true\n", "vllm", "sglang", "disable_radix_cache", True),
    ],
)
def test_what_takes_lists_has_a_list_however_many_its_members_are(
    text: str, source: str, target: str, name: str, value: Any
) -> None:
    (found,) = translate(read_text(text, "x.yaml", source), target).lines
    assert (found.name, found.value, found.reason) == (name, value, "")


def test_the_members_of_a_list_stay_apart() -> None:
    members = [{"name": "a", "of": [[1, 2], [3]]}, {"name": "b"}]
    text = yaml.safe_dump({"kv_transfer_config": {"connectors": members}})
    (found,) = translate(read_text(text, "x.yaml", "vllm"), "lmi").lines
    assert found.value == {"connectors": members}


@by_rows("first", ["speculative_config: ngram", "speculative_config: {method: mtp}"])
def test_an_object_is_a_value_or_has_fields(first: str) -> None:
    (found,) = translate(read_text(f"{first}\nspeculative_config.method: ngram\n", "x.yaml", "vllm"), "vllm").lost
    assert ("sets speculative_config" in found.reason, str(found.origin)) == (True, "x.yaml:2")


def _values(declared: DeclaredOption) -> st.SearchStrategy[Any]:
    kind, option = declared.type, declared.option
    if kind.choices:
        return st.sampled_from([str(choice) for choice in kind.choices])
    if kind.base is bool:
        return st.booleans()
    if kind.base is int:
        low, high = int(option.at_least or 1), int(option.at_most or 1 << 20)
        numbers = st.integers(low, high).filter(option.allows)
        return (
            st.sampled_from([16, 64])
            if option.power_of_two
            else st.lists(numbers, min_size=1)
            if kind.many
            else numbers
        )
    if kind.base is float:
        return st.floats(0.01, 0.99).map(lambda number: round(number, 3)).filter(option.allows)
    words = st.text("abcdefgh-_/.", min_size=1, max_size=12)
    return st.lists(words, min_size=1) if kind.many else words


def _both(row: str) -> bool:
    """Whether LMI and vLLM have a name of their own for an option, and mean the same by it."""
    there = name_in(row, "vllm")
    return row in OPTIONS and not (there.lost or there.near or "." in there.name)


BOTH = [OPTIONS[row] for row in ROWS if _both(row)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_lmis_options_that_vllm_has_come_back_as_they_were(data: st.DataObject) -> None:
    declared = data.draw(st.sampled_from(BOTH))
    text = as_text(data.draw(_values(declared)))
    first = translate(read_text(f"{declared.key}={text}\n", "serving.properties"), "vllm")
    if first.kept and all(each.exactness == "same" for each in first.lines):
        second = translate(read_text(rendered(first), "x.yaml", "vllm"), "lmi")
        third = read_text(rendered(second), "serving.properties").lines[-1]
        assert [each.exactness for each in second.lines] == ["same"]
        back = declared.type.parse(as_text(third.value), declared.option)
        assert (str(third.name), back) == (second.kept[0].name, declared.type.parse(text, declared.option))
        assert explained(str(third.name)) == explained(declared.key)


def test_most_options_of_vllm_come_back() -> None:
    assert len(BOTH) >= 45


def test_every_row_names_what_the_engines_have() -> None:
    for engine in ("vllm", "sglang", "trtllm-serve", "triton"):
        for row in ROWS:
            found = name_in(row, engine)
            if not found.lost:
                assert names_of(engine).has(found.name) or found.name == "gpt_model_path", (row, engine)


def test_what_an_engine_has_is_no_loss_in_its_own_configuration() -> None:
    for engine in ("vllm", "sglang", "trtllm-serve"):
        found = {name: name_in(row_of(name, engine), engine) for name in names_of(engine).names}
        lost = {name: each.lost for name, each in found.items() if each.lost}
        assert [name for name, reason in lost.items() if "secret" not in reason] == [], engine


OF_A_ROW = {"secret", "refused", "idle", "words", "part_of", "found_by", "chooses"}
OF_AN_ENGINE = {"name", "also", "values", "scale", "near", "lost", "remote"}


def test_a_row_has_no_column_that_nothing_reads() -> None:
    table = read_table("rows.toml", "djl_trtllm.translate")
    del table["replaced"]
    for row, columns in table.items():
        engines = {name: cell for name, cell in columns.items() if name in (*TITLES, *WORKERS)}
        assert columns.keys() - engines.keys() - OF_A_ROW <= {"all"}, row
        assert {*columns.get("all", {})} <= {"lost"}, row
        for engine, cell in engines.items():
            parts = {"name"} if isinstance(cell, str) else {*cell}
            assert parts <= OF_AN_ENGINE, (row, engine)
            assert "lost" not in parts or parts == {"lost"}, (row, engine)
        if whole := columns.get("part_of"):
            assert {*table[whole]["found_by"]} <= {*ENGINES}, row


def test_a_worker_of_dynamo_has_no_flags_of_the_server_that_it_does_not_run() -> None:
    names = names_of("dynamo.trtllm")
    assert names.has("trtllm.kv_cache_config.dtype") and names.has("namespace")
    assert [name for name in names.names if "--" in name] == []


def test_what_replaced_a_name_is_said_of_names_that_the_engine_has_not() -> None:
    for engine, names in REPLACED.items():
        assert [name for name in names if name in names_of(engine).names] == []
    for name, said in (("--num-lookahead-slots", "--speculative-config$"), ("zzzzzz", "here$")):
        with pytest.raises(DjlTrtllmError, match=said):
            explained(name)


def test_an_option_is_explained_in_every_engine_by_any_of_its_names() -> None:
    by_name = [explained(name) for name in ("max_seq_len", "--max-model-len", "context_length", "option.max_model_len")]
    assert by_name == [by_name[0]] * 4
    assert set(by_name[0]) == {*TITLES, *WORKERS} - {"dynamo"}


def test_a_setting_of_a_truss_has_its_file_and_line_and_the_files_own_warnings_are_notes() -> None:
    text = "python_version: py311\nresources:\n  accelerator: H100:4\ntrt_llm:\n  runtime:\n    max_batch_size: 8\n"
    found = read_text(text, "mine/config.yaml")
    assert {str(each.origin).partition(":")[0] for each in found.lines} == {"mine/config.yaml"}
    assert [note for note in found.notes if "it names 4 GPUs" in note] == list(found.notes)


def test_a_repository_of_tritons_llm_api_has_its_settings_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    text = "model: acme/m\nbackend: pytorch\ntensor_parallel_size: 2\nkv_cache_config: {max_tokens: 64}\n"
    (tmp_path / "1" / "model.yaml").write_text(f"{text}triton_config: {{max_batch_size: 0, decoupled: true}}\n")
    (tmp_path / "config.pbtxt").write_text('name: "tensorrt_llm"\nbackend: "python"\nmax_batch_size: 0\n')
    for name in ("config.pbtxt", "1/model.yaml"):
        given = read([str(tmp_path / name)], "triton")
        settings = {"model=acme/m", "backend=pytorch", "tensor_parallel_size=2", "kv_cache_config.max_tokens=64"}
        assert sorted(each.written for each in given.lines) == sorted({*settings, "decoupled=true"}), name
        serve, lmi = ({each.name: each.value for each in translate(given, to).kept} for to in ("trtllm-serve", "lmi"))
        arguments = {"backend": "pytorch", "tensor_parallel_size": 2, "kv_cache_config.max_tokens": 64}
        assert serve == {"model": "acme/m", **arguments}, name
        assert (lmi["option.model_id"], lmi["option.tensor_parallel_degree"]) == ("acme/m", 2)
        assert [each.written for each in translate(given, "vllm").lost if "decoupled" in each.written], name


def test_a_dot_inside_an_object_is_one_of_the_name() -> None:
    text = "compilation_config:\n  inductor_compile_config: {triton.cudagraphs: true}\n"
    (found,) = translate(read_text(text, "x.yaml", "vllm"), "lmi").lines
    assert found.value == {"inductor_compile_config": {"triton.cudagraphs": True}}


def test_a_path_may_have_thousands_of_parts() -> None:
    path = f"speculative_config{'.a' * 5000}"
    assert line(f"python -m dynamo.vllm --model M --{path} 1", "vllm").name == path


def test_thousands_of_variables_are_put_in_at_once() -> None:
    names = [f"A{number}" for number in range(15_000)]
    script = "\n".join([*(f"{name}=1" for name in names), "vllm serve M " + " ".join(["--seed $A7"] * 8000)])
    assert line(script, "vllm").value == 1


def test_a_variable_with_a_default_is_reported_and_not_put_in() -> None:
    found = translate(read_command("N=8 vllm serve M --max-num-seqs ${N:-4}"), "sglang")
    assert [each.written for each in found.lost if each.written.startswith("N=")] == ["N=8"]


def test_digits_of_other_scripts_are_text() -> None:
    assert line("vllm serve M --long-prefill-token-threshold 1٣", "vllm").value == "1٣"

"""What is read from a Truss `config.yaml`, entry by entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.config import Layer, Source
from djl_trtllm.config.compat import truss
from djl_trtllm.config.compat.truss_names import BUILD_PRESETS, ENGINE_PRESETS, STACK_PRESETS
from djl_trtllm.config.masking import MASK

PRESETS = {"build": BUILD_PRESETS, "engine": ENGINE_PRESETS, "stack": STACK_PRESETS, "none": {}}
NOT_READ = (
    "nothing reads this secret: only secrets.hf_access_token is used, for downloads from the Hugging Face hub; "
    "remove it"
)


def read(text: str) -> Source:
    """The source of the file itself, without presets."""
    return truss.parse_config(text, "config.yaml")[0]


def values(source: Source) -> list[tuple[str, str]]:
    return [(setting.key, setting.value) for setting in source.settings]


def preset(text: str, *, has_repository: bool = False) -> str:
    """Which presets come with a file."""
    _, *sources = truss.parse_config(text, "config.yaml", has_repository=has_repository)
    found = dict(values(sources[0])) if sources else {}
    (name,) = (name for name, presets in PRESETS.items() if presets == found)
    return name


# -- files -------------------------------------------------------------------------------------------------------------


def test_where_a_truss_has_its_configuration() -> None:
    assert truss.CONFIG_FILE == "config.yaml"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("trt_llm:\n", True),
        ("a: 1\nmodel_metadata : {}\n", True),
        ("secrets: {}", True),
        (" trt_llm:\n", False),
        ("# trt_llm:\n", False),
        ("trt_llm_x:\n", False),
        ("", False),
    ],
)
def test_a_truss_is_known_by_its_keys(text: str, is_one: bool) -> None:
    assert truss.is_truss(text) is is_one


def test_a_file_is_read_with_its_presets_or_beside_a_repository(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes("model_metadata: {engine_repository: é}".encode("utf-8-sig"))
    first, second = truss.read_config(path)
    assert values(first) == [("option.model_id", "é")] and second.layer is Layer.PRESET
    assert str(first.settings[0].origin) == f"{path}:1"
    assert truss.read_config(path, has_repository=True) == [first]


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert truss.read_config(path) == [
        Source(Layer.FOREIGN, problems=(f"{path} cannot be read: No such file or directory",))
    ]
    path.write_bytes(b"\xff")
    assert truss.read_config(path) == [Source(Layer.FOREIGN, problems=(f"{path} is not UTF-8 text; save it as UTF-8",))]
    path.write_text("- a")
    assert truss.read_config(path) == [Source(Layer.FOREIGN, problems=(f"{path}:1: expected `key: value` lines",))]


def test_a_file_of_another_program_is_refused() -> None:
    (source,) = truss.parse_config("colour: blue", "config.yaml")
    assert source == Source(
        Layer.FOREIGN,
        problems=(
            "config.yaml is no config.yaml of Truss: expected one of the keys model_metadata, trt_llm, build at the "
            "beginning of a line",
        ),
    )


# -- presets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "which"),
    [
        ("trt_llm:\n  build:\n    max_seq_len: 1\n", "build"),
        ("trt_llm:\n  runtime:\n    max_batch_size: 1\n", "build"),
        ("trt_llm:\n  inference_stack: v1\n", "build"),
        ("trt_llm:\n  inference_stack: v2\n", "stack"),
        ("trt_llm:\n  build:\n    max_seq_len: 1\n  inference_stack: v2\n", "stack"),
        ("trt_llm:\n  build:\n    max_seq_len: v2\n", "build"),
        ("trt_llm:\n  serve:\n    tensor_parallel_count: 1\n", "none"),
        ("trt_llm:\n  serve:\n    engine_repository: a\n", "engine"),
        ("model_metadata:\n  engine_repository: a\n", "engine"),
        ("model_metadata:\n  tensor_parallelism: 1\n", "engine"),
        ("model_metadata:\n  tokenizer_repository: a\n", "none"),
        ("build:\n  arguments:\n    engine_repository: a\n", "engine"),
        ("trt_llm: {}\n", "none"),
    ],
)
def test_presets_are_those_of_the_generation(text: str, which: str) -> None:
    assert preset(text) == which
    # What Truss builds has no repository, so one beside it is another's.
    assert preset(text, has_repository=True) == ("none" if which == "engine" else which)


def test_presets_say_that_they_are_trusss() -> None:
    _, source = truss.parse_config("trt_llm:\n  inference_stack: v2\n", "config.yaml")
    assert {str(setting.origin) for setting in source.settings} == {"derived from the presets of Truss"}


# -- entries -----------------------------------------------------------------------------------------------------------


def test_the_name_that_clients_see_counts_before_that_of_the_truss() -> None:
    for text in (
        "model_name: truss\ntrt_llm:\n  runtime:\n    served_model_name: seen\n",
        "trt_llm:\n  runtime:\n    served_model_name: seen\nmodel_name: truss\n",
    ):
        assert values(read(text))[0] == ("option.model_name", "seen")


@pytest.mark.parametrize(
    ("text", "secret"), [("x: hunter2", True), ("x: null", False), ("{}", False), ("hunter2", True)]
)
def test_a_secret_with_a_value_that_nothing_reads_is_a_warning(text: str, secret: bool) -> None:
    source = read(f"secrets:\n  {text}\n")
    name = "secrets" if text == "hunter2" else "secrets.x"
    assert source.warnings == ((f"config.yaml: {name} (line 2): {NOT_READ}",) if secret else ())
    assert source.notes == source.unknown == ()


@pytest.mark.parametrize(("text", "token"), [("my_hf_api_key", ["my_hf_api_key"]), ("null", []), ("''", [])])
def test_the_token_of_the_hub_is_a_setting_that_masks_its_value(text: str, token: list[str]) -> None:
    source = read(f"secrets:\n  hf_access_token: {text}\n")
    assert values(source) == [("option.hf_access_token", value) for value in token]
    assert [setting.shown for setting in source.settings] == [f"secrets.hf_access_token={MASK}" for _ in token]
    assert source.warnings == source.notes == source.unknown == ()


@pytest.mark.parametrize(
    ("stack", "settings", "problems"),
    [
        ("v2", [("option.backend", "pytorch")], ()),
        ("v1", [], ()),
        ("null", [], ()),
        ("v3", [], ("trt_llm.inference_stack=v3 (config.yaml:2): expected v1 or v2",)),
    ],
)
def test_the_second_stack_is_pytorchs(stack: str, settings: list[tuple[str, str]], problems: tuple[str, ...]) -> None:
    source = read(f"trt_llm:\n  inference_stack: {stack}\n")
    assert (values(source), source.problems) == (settings, problems)


def test_a_quantisation_sets_its_options() -> None:
    source = read("trt_llm:\n  build:\n    quantization_type: FP8_KV\n")
    assert values(source) == [("option.quantize", "fp8"), ("option.kv_cache_quant_algo", "FP8")]
    assert source.settings[0].shown == "trt_llm.build.quantization_type=FP8_KV"
    (problem,) = read("trt_llm:\n  build:\n    quantization_type: int5\n").problems
    assert problem == (
        "trt_llm.build.quantization_type=int5 (config.yaml:3): expected one of no_quant, fp8, fp8_kv, fp4, fp4_kv, "
        "weights_int8, weights_kv_int8, weights_int4, weights_int4_kv_int8, smooth_quant"
    )


def test_a_checkpoint_is_fetched_from_the_hub_and_from_s3() -> None:
    text = "trt_llm:\n  build:\n    checkpoint_repository:\n      source: {}\n"
    assert read(text.format("HF")).warnings == read(text.format("S3")).warnings == ()
    assert read(text.format("GCS")).warnings == (
        "trt_llm.build.checkpoint_repository.source=GCS (config.yaml:4): nothing is fetched from there; download the "
        "checkpoint and set option.model_id to its directory",
    )


def test_the_tag_of_chat_is_answered_and_others_say_nothing() -> None:
    source = read("model_metadata:\n  tags:\n  - openai-compatible\n  - another\n")
    assert source.notes == (
        "config.yaml: model_metadata.tags=openai-compatible (line 3): a request with messages gets the model's chat "
        "template in any case",
    )


def test_values_are_reported_where_they_matter_and_not_where_they_may_be_secret() -> None:
    text = (
        "environment_variables:\n  A: hunter2\nmodel_metadata:\n  example_model_input:\n    prompt: hunter2\n"
        "  other: hunter2\nrequirements:\n- a\n- b\nruntime:\n  predict_concurrency: 4\nresources:\n  cpu: '3'\n"
        "trt_llm:\n  build:\n    base_model: llama\n"
    )
    source = read(text)
    assert source.warnings == (
        "config.yaml: environment_variables.A (line 2): variables are not read from a file; set them in the "
        "server's environment",
    )
    names = [note.partition(": ")[2].rpartition(": ")[0] for note in source.notes]
    assert names == [
        "model_metadata.example_model_input (line 5)",
        "model_metadata.other (line 6)",
        "requirements (line 8)",
        "runtime.predict_concurrency=4 (line 11)",
        "resources.cpu=3 (line 13)",
        "trt_llm.build.base_model=llama (line 16)",
    ]


def test_a_name_that_truss_does_not_have_is_unknown() -> None:
    begin = "is not a setting of Truss and has no effect;"
    assert read("trt_llm:\n  build:\n    max_seq_length: 1\n").unknown == (
        f"trt_llm.build.max_seq_length (config.yaml:3) {begin} did you mean trt_llm.build.max_seq_len?",
    )
    other = "remove it, or set the option that you mean"
    assert read("trt_llm: {}\ncolour: blue\n").unknown == (f"colour (config.yaml:2) {begin} {other}",)
    assert read("trt_llm: {}\ncolour:\n").unknown == (f"colour (config.yaml:2) {begin} {other}",)
    # A section of options that is empty says nothing; one that is no section is no name.
    assert read("trt_llm:\n  build:\n  runtime: {}\n").unknown == ()
    assert read("trt_llm:\n  build: 3\n").unknown == (f"trt_llm.build (config.yaml:2) {begin} {other}",)


@pytest.mark.parametrize("section", ["build", "runtime"])
def test_the_whole_length_stands_for_prompt_and_output_where_they_have_none(section: str) -> None:
    text = f"trt_llm:\n  build:\n    max_input_len: 7\n  {section}:\n    max_seq_len: 9\n"
    if section == "build":
        text = "trt_llm:\n  build:\n    max_seq_len: 9\n    max_input_len: 7\n"
    assert sorted(values(read(text))) == [
        ("option.max_input_len", "7"),
        ("option.max_output_len", "9"),
        ("option.max_seq_len", "9"),
    ]


@pytest.mark.parametrize(
    ("accelerator", "tensor", "pipeline", "told"),
    [
        ("A100:4", "2", "2", None),
        ("A100:4", "2", "1", "it names 4 GPUs, and tensor and pipeline parallelism need 2"),
        ("A100:2", "2", "2", "it names 2 GPUs, and tensor and pipeline parallelism need 4"),
        ("A100", "1", "1", None),
        ("A100", "2", "1", "it names 1 GPUs, and tensor and pipeline parallelism need 2"),
        ("A100:4", "max", "1", None),
        ("A100:4", "10000", "1", None),
        ("A100:100", "1", "1", None),
        ("A100:0", "2", "1", None),
        ("'two A100'", "2", "1", None),
    ],
)
def test_gpus_that_do_not_fit_the_parallelism_are_reported(
    accelerator: str, tensor: str, pipeline: str, told: str | None
) -> None:
    text = (
        f"resources:\n  accelerator: {accelerator}\n"
        f"model_metadata:\n  tensor_parallelism: {tensor}\n  pipeline_parallelism: {pipeline}\n"
    )
    place = f"resources.accelerator={accelerator} (config.yaml:2)"
    assert read(text).warnings == ((f"{place}: {told}",) if told else ())
    assert read(text.replace("resources:\n  accelerator", "runtime:\n  other")).warnings == ()


def test_parallelism_that_is_not_said_is_one() -> None:
    assert read("resources:\n  accelerator: A100:4\n").warnings == (
        "resources.accelerator=A100:4 (config.yaml:2): it names 4 GPUs, and tensor and pipeline parallelism need 1",
    )

"""What is read from the files of a Triton model repository, entry by entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.config import Layer, Source
from djl_trtllm.config.compat import triton
from djl_trtllm.config.compat.triton import repository_files

PLACE = "tensorrt_llm/config.pbtxt"
SCHEDULER = "it configures Triton's own scheduler, which is not used here"


def read(text: str, path: str = PLACE) -> Source:
    return triton.parse_config(text, path)


def values(source: Source) -> list[tuple[str, str]]:
    return [(setting.key, setting.value) for setting in source.settings]


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


def repository(root: Path, **texts: str) -> tuple[Path, ...]:
    for model, text in texts.items():
        (root / model).mkdir(parents=True)
        (root / model / "config.pbtxt").write_text(text)
    return repository_files(root)


# -- files -------------------------------------------------------------------------------------------------------------


def test_the_files_of_a_repository_are_those_of_its_models_the_engines_first(tmp_path: Path) -> None:
    models = ("postprocessing", "preprocessing", "ensemble", "tensorrt_llm_bls", "tensorrt_llm", "another")
    files = repository(tmp_path, **dict.fromkeys(models, ""))
    assert [path.parent.name for path in files] == [
        "tensorrt_llm",
        "tensorrt_llm_bls",
        "ensemble",
        "preprocessing",
        "postprocessing",
    ]
    assert repository_files(tmp_path / "another") == (tmp_path / "another" / "config.pbtxt",)
    assert repository_files(tmp_path / "nowhere") == ()
    (tmp_path / "config.pbtxt").write_text("")
    assert repository_files(tmp_path) == files


def test_no_files_are_no_sources() -> None:
    assert triton.read_repository(()) == []


def test_one_file_is_one_source_and_several_bring_tritons_presets(tmp_path: Path) -> None:
    files = repository(tmp_path, ensemble="max_batch_size: 8", tensorrt_llm="max_batch_size: 8")
    assert [source.layer for source in triton.read_repository(files[:1])] == [Layer.FOREIGN]
    assert [source.layer for source in triton.read_repository(files[1:])] == [Layer.FOREIGN]
    assert [source.layer for source in triton.read_repository(files)] == [Layer.FOREIGN, Layer.FOREIGN, Layer.PRESET]


def test_what_another_model_has_said_already_is_left_out(tmp_path: Path) -> None:
    files = repository(
        tmp_path,
        tensorrt_llm="max_batch_size: 8",
        tensorrt_llm_bls="max_batch_size: 8\n" + parameter("accumulate_tokens", "true"),
        ensemble="max_batch_size: 1",
        preprocessing="max_batch_size: 8",
        postprocessing="max_batch_size: 1",
    )
    sources = triton.read_repository(files)
    assert [values(source) for source in sources[:-1]] == [
        [("option.max_rolling_batch_size", "8")],
        [("option.accumulate_tokens", "true")],
        [("option.max_rolling_batch_size", "1")],
        [],
        [],
    ]


def test_a_repository_without_its_engine_is_reported_where_to_put_it(tmp_path: Path) -> None:
    files = repository(tmp_path, ensemble="max_batch_size: 1", preprocessing="max_batch_size: 1")
    problems = [problem for source in triton.read_repository(files) for problem in source.problems]
    assert problems == [
        f"{tmp_path} has no tensorrt_llm/config.pbtxt: copy it beside ensemble/config.pbtxt",
    ]
    with_engine = repository(tmp_path / "whole", ensemble="", tensorrt_llm="")
    assert not any(source.problems for source in triton.read_repository(with_engine))


def test_what_triton_presets() -> None:
    source = triton.triton_presets()
    assert values(source) == [
        ("option.batch_scheduler_policy", "guaranteed_no_evict"),
        ("triton_http_port", "8000"),
        ("triton_grpc_port", "8001"),
        ("triton_metrics_port", "8002"),
    ]
    assert str(source.settings[0].origin) == "derived from the presets of Triton"


def test_a_file_may_begin_with_a_mark_of_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes('name: "é" max_batch_size: 8'.encode("utf-8-sig"))
    assert values(triton.read_config(path)) == [("option.max_rolling_batch_size", "8")]


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    assert triton.read_config(path) == Source(
        Layer.FOREIGN, problems=(f"{path} cannot be read: No such file or directory",)
    )
    path.write_bytes(b"\xff")
    assert triton.read_config(path) == Source(Layer.FOREIGN, problems=(f"{path} is not UTF-8 text; save it as UTF-8",))
    path.write_text("\nmax_batch_size = 8")
    assert triton.read_config(path) == Source(
        Layer.FOREIGN, problems=(f"{path}:2: there is = where a : belongs; write max_batch_size: value",)
    )


# -- which model it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text", "refused"),
    [
        ("tensorrt_llm/config.pbtxt", "", True),
        ("ensemble/config.pbtxt", "", False),
        ("ensemble/config.pbtxt", 'name: "tensorrt_llm"', False),
        ("folder/config.pbtxt", "", True),
        ("folder/config.pbtxt", 'name: "ensemble"', False),
        ("folder/config.pbtxt", 'name: "another"', True),
        ("folder/config.pbtxt", 'platform: "ensemble"', False),
        ("folder/config.pbtxt", 'platform: "another"', True),
        ("folder/config.pbtxt", 'name { platform: "ensemble" }', True),
    ],
)
def test_a_model_is_known_by_its_folder_its_name_or_its_platform(path: str, text: str, refused: bool) -> None:
    """What is to be filled in differs from model to model: of these only the engine's has a scheduler policy."""
    source = read(text + "\n" + parameter("batch_scheduler_policy", "${policy}"), path)
    assert bool(source.problems) is refused
    assert bool(source.warnings) is not refused


# -- entries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [("t", "true"), ("Y", "true"), ("f", "false"), ("n", "false"), ("true", "true"), ("no", "no")],
)
@pytest.mark.parametrize("name", ["add_special_tokens", "skip_special_tokens"])
def test_one_letter_may_stand_for_a_yes_or_no(name: str, written: str, meant: str) -> None:
    assert values(read(parameter(name, written))) == [(f"option.{name}", meant)]


@pytest.mark.parametrize(("written", "meant"), [("t", "true"), ("N", "false"), ("True", "True")])
def test_decoupled_is_read_from_the_transaction_policy(written: str, meant: str) -> None:
    assert values(read(f"model_transaction_policy {{ decoupled: {written} }}")) == [("option.decoupled", meant)]


def test_one_letter_is_itself_elsewhere() -> None:
    assert values(read(parameter("max_beam_width", "t"))) == [("option.max_beam_width", "t")]


def test_the_last_of_two_equal_names_counts_and_is_reported() -> None:
    source = read("max_batch_size: 8\n\nmax_batch_size: 16\n")
    assert values(source) == [("option.max_rolling_batch_size", "16")]
    assert source.warnings == (f"max_batch_size=16 ({PLACE}:3): it is set on line 1 too; the last one is used",)


def test_preferred_sizes_other_than_the_batch_are_answered() -> None:
    text = "max_batch_size: 8 dynamic_batching {{ preferred_batch_size: [ {} ] }}"
    answer = f"{PLACE}: preferred_batch_size=4 (line 1): a request joins the running batch at the next iteration"
    assert read(text.format("4, 8")).notes == (answer,)
    assert read(text.format("8")).notes == read(text.format("${sizes}")).notes == ()
    assert read("dynamic_batching { preferred_batch_size: 4 }").notes == (answer,)


def test_a_size_that_means_nothing_here_is_reported() -> None:
    source = read("max_batch_size: 0")
    assert values(source) == []
    assert source.warnings == (
        f"max_batch_size=0 ({PLACE}:1): 0 means that requests are not batches; set option.max_rolling_batch_size",
    )
    source = read("dynamic_batching { default_queue_policy { max_queue_size: 0 } }")
    assert values(source) == []
    assert source.notes == (
        f"{PLACE}: max_queue_size=0 (line 1): 0 is a queue without a bound in Triton; here job_queue_size bounds it",
    )
    assert values(read(parameter("max_beam_width", "0"))) == [("option.max_beam_width", "0")]


def test_fields_of_tritons_scheduler_are_answered_by_name() -> None:
    source = read("optimization { level: 1 }\nresponse_cache { enable: true }\ndynamic_batching { priority_levels: 3 }")
    assert source.notes == (
        f"{PLACE}: optimization (line 1), response_cache (line 2), priority_levels=3 (line 3): {SCHEDULER}",
    )
    source = read("instance_group { name: 'a' kind: KIND_GPU count: 1 profile: 'b' }")
    assert source.notes == (f"{PLACE}: profile=b (line 1): {SCHEDULER}",)


def test_names_and_tensors_say_nothing_that_could_be_set() -> None:
    assert read("name: 'a' backend: 'b' input { name: 'c' } version_policy { latest {} }") == Source(Layer.FOREIGN)


def test_a_field_that_triton_does_not_have_is_unknown() -> None:
    begin = "is not a setting of Triton's TensorRT-LLM backend and has no effect;"
    for text, told in (
        ("max_batch_sise: 8", f"max_batch_sise ({PLACE}:1) {begin} did you mean max_batch_size?"),
        ("colour: 8", f"colour ({PLACE}:1) {begin} remove it, or set the option that you mean"),
        ("max_batch_size { a: 1 }", f"max_batch_size ({PLACE}:1) {begin} did you mean max_batch_size?"),
        (parameter("gpt_model_pat", "x"), f"gpt_model_pat ({PLACE}:1) {begin} did you mean gpt_model_path?"),
    ):
        assert read(text).unknown == (told,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("parameters: 3", 'parameters= (PLACE:1): expected { key: "NAME" value: { string_value: "VALUE" } }'),
        (
            'parameters { value: { string_value: "1" } }',
            'parameters= (PLACE:1): expected { key: "NAME" value: { string_value: "VALUE" } }',
        ),
        (
            'parameters { key { a: 1 } value: { string_value: "1" } }',
            'parameters= (PLACE:1): expected { key: "NAME" value: { string_value: "VALUE" } }',
        ),
        ('\nparameters {\n key: "k" }', 'k= (PLACE:2): expected value: { string_value: "..." }'),
        ('parameters {\n key: "k"\n value: 7 }', 'k= (PLACE:3): expected value: { string_value: "7" }'),
        (
            'parameters {\n key: "k"\n value: { int64_value: 7 } }',
            'k= (PLACE:3): expected value: { string_value: "..." }',
        ),
        (
            'parameters {\n key: "k"\n value: { string_value { a: 7 } } }',
            'k= (PLACE:3): expected value: { string_value: "..." }',
        ),
    ],
)
def test_a_parameter_of_another_form_is_reported_with_the_right_one(text: str, told: str) -> None:
    assert read(text) == Source(Layer.FOREIGN, problems=(told.replace("PLACE", PLACE),))


def test_the_value_of_a_parameter_is_found_among_other_fields() -> None:
    source = read('parameters { value { other: "x" string_value: "2" } more: "y" key: "max_beam_width" }')
    assert values(source) == [("option.max_beam_width", "2")]


def test_an_engine_elsewhere_is_the_model() -> None:
    for path in ("/engines/llama", "/x_tensorrt_llm/1", "tensorrt_llm/1/more", "tensorrt_llm/one"):
        assert values(read(parameter("gpt_model_path", path))) == [("option.model_id", path)]
    for path in ("tensorrt_llm/1", "/repo/tensorrt_llm/12/"):
        assert read(parameter("gpt_model_path", path)) == Source(Layer.FOREIGN)


def test_a_path_of_the_template_does_not_replace_the_engine_that_is_there(tmp_path: Path) -> None:
    """Triton's templates are filled with the path of their author's machine, or with any."""
    (files,) = repository(tmp_path, tensorrt_llm=parameter("gpt_model_path", str(tmp_path / "elsewhere")))
    assert values(triton.read_config(files)) == [("option.model_id", str(tmp_path / "elsewhere"))]
    own = tmp_path / "tensorrt_llm" / "1"
    own.mkdir()
    (own / "rank0.engine").touch()
    source = triton.read_config(files)
    assert values(source) == []
    (note,) = source.notes
    assert note.startswith(f"{files}: gpt_model_path=/")
    assert note.endswith(f"(line 1): there is no engine; the one in {own} is served")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rank0.engine").touch()
    assert values(triton.read_config(files)) == [("option.model_id", str(tmp_path / "elsewhere"))]


def test_a_path_that_no_file_system_takes_is_no_engine(tmp_path: Path) -> None:
    (files,) = repository(tmp_path, tensorrt_llm=parameter("gpt_model_path", "x" * 5000))
    (tmp_path / "tensorrt_llm" / "1").mkdir()
    (tmp_path / "tensorrt_llm" / "1" / "openvino_model.xml").touch()
    assert values(triton.read_config(files)) == []


def test_the_program_of_a_rank_by_both_of_its_names() -> None:
    answer = "the engine process is part of this package"
    assert read(parameter("executor_worker_path", "/w")).notes == (
        f"{PLACE}: executor_worker_path=/w (line 1): {answer}",
    )
    assert read(parameter("worker_path", "/w")).notes == (
        f"{PLACE}: worker_path=/w (line 1): an older name of executor_worker_path: {answer}",
    )

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message
from hypothesis import given, settings, strategies as st

from djl_trtllm.config import Config
from djl_trtllm.config.compat import triton
from djl_trtllm.config.compat.foreign_format import FormatError
from djl_trtllm.config.compat.triton import (
    ENGINE_MODEL,
    EXAMPLES,
    IGNORED,
    MODELS,
    OPTION_OF,
    STRUCTURE,
    TO_FILL,
    TRITON_ONLY,
    Field,
    parse,
    repository_files,
)
from djl_trtllm.config.options import find
from djl_trtllm.config.resolve import resolve
from djl_trtllm.config.sources import Layer, Source
from djl_trtllm.errors import ConfigError
from tests.config.helpers import resolves_or_is_refused, values
from tests.support.tables import by_table


def from_text(text: str, path: str = "tensorrt_llm/config.pbtxt") -> Config:
    return resolve([triton.parse_config(text, path), triton.triton_presets()])


def problems_of(text: str, path: str = "tensorrt_llm/config.pbtxt") -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        from_text(text, path)
    return caught.value.problems


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


def repository(root: Path, **texts: str) -> tuple[Path, ...]:
    """The files of a repository with these models."""
    for model, text in texts.items():
        (root / model).mkdir(parents=True)
        (root / model / "config.pbtxt").write_text(text)
    return repository_files(root)


@by_table("text", "name", "value")
def test_a_value_becomes_its_option_and_keeps_its_line(text: str, name: str, value: object) -> None:
    config = from_text("\n" + text)
    assert getattr(config.options, name) == value
    assert str(config.origin(name)) == "tensorrt_llm/config.pbtxt:2"
    assert config.is_set(name)


def test_what_is_not_filled_in_counts_as_not_set_and_is_reported_once() -> None:
    config = from_text(
        parameter("max_beam_width", "${max_beam_width}") + parameter("decoding_mode", "${decoding_mode}")
    )
    assert not config.is_set("max_beam_width")
    (warning,) = config.warnings
    assert "not filled in" in warning and "max_beam_width (line 1), decoding_mode (line 2)" in warning


def test_a_placeholder_is_an_error_only_where_triton_refuses_it() -> None:
    fields = {
        "max_batch_size": "max_batch_size: ${triton_max_batch_size}",
        "decoupled": "model_transaction_policy { decoupled: ${decoupled_mode} }",
    }
    told = 0
    for model in MODELS:
        for name in sorted(TO_FILL[model]):
            (problem,) = problems_of(fields.get(name, parameter(name, "${x}")), f"{model}/config.pbtxt")
            assert problem.startswith(f"{name}=${{")
            assert f"({model}/config.pbtxt:1): this is not filled in" in problem
            assert problem.endswith(f"for example {EXAMPLES[name]}")
            told += 1
    assert told >= 10


def test_the_template_as_it_is_says_nothing_but_what_was_set() -> None:
    text = """
        name: "tensorrt_llm" backend: "tensorrtllm" max_batch_size: 8
        dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 0 }
        input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] } ]
        instance_group [ { count: 1 kind: KIND_CPU } ]
    """
    config = from_text(text)
    assert config.warnings == () and config.notes == ()


_NAMES = st.sampled_from([*OPTION_OF, *IGNORED, "gpt_model_path", "nonsense"])
_VALUES = st.text(max_size=10) | st.sampled_from(["", "${x}", "true", "0", "256", "0.9", "max_utilization", "v1"])


def test_triton_has_defaults_for_these_placeholders_and_lists_are_one_setting() -> None:
    config = from_text(
        parameter("kv_cache_free_gpu_mem_fraction", "${kv_cache_free_gpu_mem_fraction}")
        + parameter("batch_scheduler_policy", "${batch_scheduler_policy}")
        + "instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0, 1, 2, 3 ] } ]\n"
    )
    assert not config.is_set("kv_cache_free_gpu_mem_fraction")
    assert config.options.batch_scheduler_policy == "guaranteed_no_evict"
    (warning,) = config.warnings
    assert "kv_cache_free_gpu_mem_fraction (line 1), batch_scheduler_policy (line 2)" in warning
    (note,) = config.notes
    assert "instance_group.gpus=0,1,2,3 (line 3)" in note


@given(st.lists(st.tuples(_NAMES, _VALUES), max_size=6))
def test_any_parameters_resolve_or_are_refused(pairs: list[tuple[str, str]]) -> None:
    text = "".join(
        f"parameters {{ key: {_quoted(key)} value: {{ string_value: {_quoted(value)} }} }}\n" for key, value in pairs
    )
    resolves_or_is_refused([triton.parse_config(text, PLACE), triton.triton_presets()])


def _quoted(text: str) -> str:
    return '"' + "".join(f"\\{byte:03o}" for byte in text.encode("utf-8", "surrogatepass")) + '"'


# -- What is read from the files of a Triton model repository, entry by entry --


PLACE = "tensorrt_llm/config.pbtxt"


def read(text: str, path: str = PLACE) -> Source:
    return triton.parse_config(text, path)


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


def test_one_file_is_one_source_and_several_bring_tritons_presets(tmp_path: Path) -> None:
    files = repository(tmp_path, ensemble="max_batch_size: 1", tensorrt_llm="max_batch_size: 64")
    assert [source.layer for source in triton.read_repository(files[:1])] == [Layer.FOREIGN]
    sources = triton.read_repository(files)
    assert [source.layer for source in sources] == [Layer.FOREIGN, Layer.FOREIGN, Layer.PRESET]
    ports = [(f"triton_{name}_port", port) for name, port in (("http", "8000"), ("grpc", "8001"), ("metrics", "8002"))]
    assert values(sources[-1]) == [("option.batch_scheduler_policy", "guaranteed_no_evict"), *ports]
    # The engine's model overrides the others.
    config = resolve(sources)
    assert config.options.max_rolling_batch_size == 64
    assert any("max_batch_size=1 is overridden" in warning for warning in config.warnings)


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


def test_a_file_is_utf_8_with_or_without_a_mark_and_one_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    assert triton.read_config(path).problems == (f"{path} cannot be read: No such file or directory",)
    for content, problem in (
        (b"\xff", f"{path} is not UTF-8 text; save it as UTF-8"),
        (b"\nmax_batch_size = 8", f"{path}:2: there is = where a : belongs; write max_batch_size: value"),
    ):
        path.write_bytes(content)
        assert triton.read_config(path) == Source(Layer.FOREIGN, problems=(problem,))
    path.write_bytes('name: "é" max_batch_size: 8'.encode("utf-8-sig"))
    assert values(triton.read_config(path)) == [("option.max_rolling_batch_size", "8")]


@by_table("path", "text", "refused")
def test_a_model_is_known_by_its_folder_its_name_or_its_platform(path: str, text: str, refused: bool) -> None:
    """What is to be filled in differs from model to model: of these only the engine's has a type of batching."""
    source = read(text + "\n" + parameter("gpt_model_type", "${type}"), path)
    assert bool(source.problems) is refused
    assert bool(source.warnings) is not refused


LLM_API = """\
model: org/model
backend: pytorch
tensor_parallel_size: 2
kv_cache_config:
  enable_block_reuse: false
triton_config: {max_batch_size: 0, decoupled: true, cancellation_check_period_ms: 50}
"""


def of_llm_api(tmp_path: Path, text: str) -> list[Source]:
    version = tmp_path / "tensorrt_llm" / "1"
    files = repository(tmp_path, tensorrt_llm='name: "tensorrt_llm"\nbackend: "python"\n')
    version.mkdir()
    (version / triton.LLM_API_FILE).write_text(text)
    return triton.read_repository(files)


def test_the_file_of_the_llm_api_has_its_model_what_triton_is_told_and_arguments_of_the_engine(tmp_path: Path) -> None:
    sources = of_llm_api(tmp_path, LLM_API)
    options = resolve(sources).options
    assert (options.model_id, options.backend, options.decoupled) == ("org/model", "pytorch", True)
    assert options.triton_model == "llmapi"
    settings = {setting.key: setting for source in sources for setting in source.settings}
    arguments = {"tensor_parallel_size": 2, "kv_cache_config": {"enable_block_reuse": False}}
    assert json.loads(settings["option.extra_llm_api_options"].value) == arguments
    places = ("option.model_id", "option.backend", "option.extra_llm_api_options")
    assert [settings[name].origin.line for name in places] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("backend: pytorch\n", "model is missing: expected a directory or an id"),
        (LLM_API + "logits_post_processors: {ban: my.module:Ban}\n", "logits_post_processors=.*yaml:7.*: code"),
        ("model: a\nmodel: b\n", "model is here and on line 1"),
        ("- a\n", "expected `key: value` lines"),
        ("model: !!python/name:os.system x\n", "not YAML"),
        ("model: 2026-13-45\n", "not YAML"),
        (LLM_API.replace("decoupled: true", "decoupled: perhaps"), "decoupled=perhaps"),
        ("model:\nbackend: pytorch\n", "model is missing"),
        ("model: a\ntriton_config: decoupled\n", "triton_config=decoupled .*yaml:2"),
        ("model: a\nkv_cache_config: {2026-01-01: 1}\n", "keys must be"),
        ("!!set {model}\n", "expected `key: value` lines"),
        (f"model: a\nx: 0x{'f' * 9000}\n", "digits"),
        (f"model: &long {'a' * 100_000}\nx: [{'*long, ' * 1000}]\n", "characters"),
    ],
)
def test_what_is_wrong_in_the_file_of_the_llm_api_is_refused_with_its_line(
    text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(of_llm_api(tmp_path, text))


def test_the_file_of_the_llm_api_may_merge_mappings(tmp_path: Path) -> None:
    text = "<<: {model: org/model, triton_config: {decoupled: true}}\nbackend: pytorch\n"
    options = resolve(of_llm_api(tmp_path, text)).options
    assert (options.model_id, options.backend, options.decoupled) == ("org/model", "pytorch", True)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates()
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(LEAVES, inner), max_leaves=8)
KEYS = st.sampled_from(("model", "backend", "triton_config", "logits_post_processors")) | LEAVES


@settings(max_examples=40)
@given(st.dictionaries(KEYS, TREES, max_size=4).map(yaml.safe_dump) | st.text())
def test_any_file_of_the_llm_api_resolves_or_is_refused(text: str) -> None:
    resolves_or_is_refused([triton.parse_llm_api(text, PLACE)])


def test_values_of_the_llm_apis_file_may_come_from_an_alias_and_null_is_none(tmp_path: Path) -> None:
    text = "<<: {model: a, triton_config: {decoupled: 'false'}}\nbackend:\n"
    config = resolve(of_llm_api(tmp_path, text))
    assert (config.options.model_id, config.options.decoupled) == ("a", False)
    assert not config.is_set("backend") and not config.is_set("extra_llm_api_options")


def test_a_repository_of_the_llm_api_has_tritons_ports(tmp_path: Path) -> None:
    options = resolve(of_llm_api(tmp_path, LLM_API)).options
    assert (options.triton_http_port, options.triton_grpc_port, options.triton_metrics_port) == (8000, 8001, 8002)


def test_what_triton_is_told_and_nobody_knows_is_reported(tmp_path: Path) -> None:
    sources = of_llm_api(tmp_path, LLM_API.replace("decoupled", "decouple"))
    assert any("decouple" in warning and "decoupled" in warning for warning in resolve(sources).warnings)


@by_table("text", "setting")
def test_a_value_is_found_and_may_have_another_word_there(text: str, setting: list[str]) -> None:
    assert values(read(text)) == [tuple(setting)]


@by_table("text", "settings", "warnings", "notes")
def test_an_entry_is_answered_where_it_says_nothing_here(
    text: str, settings: list[list[str]], warnings: list[str], notes: list[str]
) -> None:
    source = read(text)
    assert [list(each) for each in values(source)] == settings
    for found, expected in ((source.warnings, warnings), (source.notes, notes)):
        patterns = [re.escape(line.replace("PLACE", PLACE)).replace(r"\.\*", ".*") for line in expected]
        assert len(found) == len(patterns)
        assert all(re.fullmatch(pattern, line) for pattern, line in zip(patterns, found, strict=True))


def test_a_field_that_triton_does_not_have_is_unknown() -> None:
    begin = "is not a setting of Triton's TensorRT-LLM backend and has no effect;"
    for text, told in (
        ("max_batch_sise: 8", f"max_batch_sise ({PLACE}:1) {begin} did you mean max_batch_size?"),
        ("colour: 8", f"colour ({PLACE}:1) {begin} remove it, or set the option that you mean"),
        ("max_batch_size { a: 1 }", f"max_batch_size ({PLACE}:1) {begin} did you mean max_batch_size?"),
        (parameter("gpt_model_pat", "x"), f"gpt_model_pat ({PLACE}:1) {begin} did you mean gpt_model_path?"),
    ):
        assert read(text).unknown == (told,)


@by_table("text", "told")
def test_a_parameter_of_another_form_is_reported_with_the_right_one(text: str, told: str) -> None:
    assert read(text) == Source(Layer.FOREIGN, problems=(told.replace("PLACE", PLACE),))


def test_an_engine_elsewhere_is_the_model() -> None:
    for path in ("/engines/llama", "/x_tensorrt_llm/1", "tensorrt_llm/1/more", "tensorrt_llm/one"):
        assert values(read(parameter("gpt_model_path", path))) == [("option.model_id", path)]
    for path in ("tensorrt_llm/1", "/repo/tensorrt_llm/12/"):
        assert read(parameter("gpt_model_path", path)) == Source(Layer.FOREIGN)


@pytest.mark.parametrize(
    ("policy", "version"),
    [
        ("", "10"),
        ("version_policy: { latest: { num_versions: 2 } }", "10"),
        ("version_policy: { all: {} }", "10"),
        ("version_policy: { specific: { versions: [1, 2, 3] } }", "2"),
        ("version_policy: { specific: { versions: 1 } }", "1"),
        ("version_policy: {", "10"),
        ("version_policy: { specific: { versions: [3, 4] } }", None),
    ],
)
def test_the_version_is_the_highest_one_that_triton_would_load(
    tmp_path: Path, policy: str, version: str | None
) -> None:
    (file,) = repository(tmp_path, tensorrt_llm=policy)
    for name in ("1", "2", "9", "10", "011", "11b", "x"):
        (file.parent / name).mkdir()
    (file.parent / "12").touch()
    assert triton.llm_api_file(file) is None
    if policy.startswith("version_policy: {") and version is None:
        (problem,) = triton.read_config(file).problems
        assert str(file) in problem and "1, 10, 2, 9" in problem
        return
    for name in ("1", "2", "10"):
        (file.parent / name / triton.LLM_API_FILE).write_text(f"model: m{name}\n")
    assert triton.llm_api_file(file) == file.parent / str(version) / triton.LLM_API_FILE


def test_a_path_of_the_template_does_not_replace_the_engine_that_is_there(tmp_path: Path) -> None:
    """Triton's templates are filled with the path of their author's machine, or with any."""
    elsewhere = tmp_path / "elsewhere"
    (file,) = repository(tmp_path, tensorrt_llm=parameter("gpt_model_path", str(elsewhere)))
    assert values(triton.read_config(file)) == [("option.model_id", str(elsewhere))]
    own = tmp_path / "tensorrt_llm" / "1"
    own.mkdir()
    (own / "openvino_model.xml").touch()
    source = triton.read_config(file)
    (note,) = source.notes
    assert values(source) == [] and note.startswith(f"{file}: gpt_model_path=/")
    assert note.endswith(f"(line 1): there is no engine; the one in {own} is served")
    file.write_text(parameter("gpt_model_path", "/repo/tensorrt_llm/2"))
    assert values(triton.read_config(file)) == [] and triton.read_config(file).notes[0].endswith(f"{own} is served")
    (own.parent / "2").mkdir()
    file.write_text(parameter("gpt_model_path", "/repo/tensorrt_llm/1"))
    assert values(triton.read_config(file)) == [("option.model_id", str(own))]
    (own.parent / "2").rmdir()
    assert values(triton.read_config(file)) == []
    elsewhere.mkdir()
    (elsewhere / "rank0.engine").touch()
    file.write_text(parameter("gpt_model_path", str(elsewhere)))
    assert values(triton.read_config(file)) == [("option.model_id", str(elsewhere))]
    # A name that no file system takes is no engine.
    file.write_text(parameter("gpt_model_path", "x" * 5000))
    assert values(triton.read_config(file)) == []


def test_every_name_is_an_option_and_has_one_meaning() -> None:
    assert len(OPTION_OF) > 20 and {name: key for name, key in OPTION_OF.items() if find(key) is None} == {}
    kinds = (set(OPTION_OF), set(IGNORED), STRUCTURE, TRITON_ONLY)
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert MODELS[0] == ENGINE_MODEL and set(TO_FILL) == set(MODELS)
    to_fill = {name for fields in TO_FILL.values() for name in fields}
    assert to_fill == set(EXAMPLES) and to_fill <= set(OPTION_OF)


def a_message_type() -> type[Message]:
    """`message M { string s = 1; repeated string r = 2; repeated M m = 3; int64 n = 4; }`"""
    file = descriptor_pb2.FileDescriptorProto(name="m.proto", syntax="proto3")
    message = file.message_type.add(name="M")
    kind = descriptor_pb2.FieldDescriptorProto
    types = {"s": kind.TYPE_STRING, "r": kind.TYPE_STRING, "m": kind.TYPE_MESSAGE, "n": kind.TYPE_INT64}
    for number, (name, type_) in enumerate(types.items(), start=1):
        label = kind.LABEL_REPEATED if name in "rm" else kind.LABEL_OPTIONAL
        of = ".M" if name == "m" else None
        message.field.add(name=name, number=number, type=type_, label=label, type_name=of, json_name=name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message_type: type[Message] = message_factory.GetMessageClass(pool.FindMessageTypeByName("M"))
    return message_type


M = a_message_type()


def fields_of(message: Message) -> list[list[object]]:
    """What `parse` is to find, without lines."""
    found: list[list[object]] = []
    if message.s:
        found.append(["s", message.s])
    found += [["r", text] for text in message.r]
    found += [["m", fields_of(inner)] for inner in message.m]
    if message.n:
        found.append(["n", str(message.n)])
    return found


def without_lines(fields: tuple[Field, ...]) -> list[list[object]]:
    return [
        [field.name, field.value if isinstance(field.value, str) else without_lines(field.value)] for field in fields
    ]


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_leaves = st.fixed_dictionaries(
    {}, optional={"s": _texts, "r": st.lists(_texts, max_size=3), "n": st.integers(-(2**62), 2**62)}
)
_trees = st.recursive(
    _leaves,
    lambda inner: st.builds(
        lambda leaf, members: {**leaf, "m": members}, _leaves, st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@given(_trees, st.booleans(), st.booleans(), st.booleans())
def test_it_reads_what_the_library_writes(tree: dict[str, object], utf8: bool, angle: bool, one_line: bool) -> None:
    message = M(**tree)
    text = text_format.MessageToString(
        message, as_utf8=utf8, pointy_brackets=angle, as_one_line=one_line, use_short_repeated_primitives=True
    )
    assert without_lines(parse(text)) == fields_of(message)


@given(st.text(alphabet=st.sampled_from("ab:{}<>[],;\"'\\\n# 1-.${}x")) | st.text())
def test_any_text_is_read_or_refused_with_its_line(text: str) -> None:
    try:
        parse(text)
    except FormatError as error:
        assert 1 <= error.line <= text.count("\n") + 1
        assert str(error)


def test_every_value_has_its_line() -> None:
    text = '# head\nname: "x"\nparameters {\n  key: "k"\n  value: { string_value:\n  "v"\n "w" } }\nd: [ 1,\n 2 ]\n'
    name, parameters, one, two = parse(text)
    assert (name.line, one.line, two.line) == (2, 8, 9)
    assert isinstance(parameters.value, tuple)
    key, value = parameters.value
    assert (key.value, key.line) == ("k", 4)
    assert value.value == (Field("string_value", "vw", 6),)


@by_table("text", "fields")
def test_fields_are_read_in_every_way_that_they_may_be_written(text: str, fields: list[list[object]]) -> None:
    assert without_lines(parse(text)) == fields


@by_table("text", "line", "says")
def test_a_mistake_is_reported_with_its_line_and_what_to_write(text: str, line: int, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse(text)
    assert (str(caught.value), caught.value.line) == (says, line)


def test_fifty_messages_may_stand_inside_each_other() -> None:
    assert len(parse("a {" * 50 + "}" * 50)) == 1

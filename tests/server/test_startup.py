"""What a server is started with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from djl_trtllm.errors import ConfigError, DjlTrtllmError, LayoutError
from djl_trtllm.server import startup
from djl_trtllm.server.startup import plan_startup
from djl_trtllm.service import Model, open_source
from tests.support.models import scripted_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return scripted_model(tmp_path / "story", None, **{"option.predict_timeout": 77})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder of models, and of what is none."""
    path = tmp_path / "store"
    for name in ("red", "blue"):
        scripted_model(path / name, None, **{"option.model_name": "other"})
    (path / "packed.tar.gz").write_bytes(b"")
    (path / "README.txt").write_text("models")
    return path


# -- one model ---------------------------------------------------------------------------------------------------------


def test_a_directory_is_the_one_model_and_configures_the_server(model: Path) -> None:
    options, [startup], store = plan_startup(str(model), {})
    assert (options.predict_timeout, store) == (77, None)
    assert (startup.name, startup.source) == ("scripted", str(model))
    prepared = startup.prepare()
    assert (prepared.name, prepared.directory) == ("scripted", model)


def test_arguments_win_over_the_file_and_the_environment_for_the_server_and_its_models(
    model: Path, store: Path
) -> None:
    environ = {"OPTION_PREDICT_TIMEOUT": "5", "SERVING_MAX_REQUEST_SIZE": "6"}
    arguments = ["predict_timeout=9", "max_request_size=7", "load_models=red"]
    options, [planned], _ = plan_startup(str(model), environ, arguments)
    assert (options.predict_timeout, options.max_request_size) == (9, 7)
    assert planned.prepare().config.options.predict_timeout == 9
    options, [planned], _ = plan_startup(None, {**environ, "SERVING_MODEL_STORE": str(store)}, arguments)
    assert (options.max_request_size, planned.name) == (7, "red")
    assert planned.prepare().config.options.predict_timeout == 9
    two = {**environ, "SERVING_LOAD_MODELS": f"a={store / 'red'},b={store / 'blue'}"}
    options, planned_two, _ = plan_startup(None, two, ["predict_timeout=9", "max_request_size=7"])
    assert options.max_request_size == 7
    assert [each.prepare().config.options.predict_timeout for each in planned_two] == [9, 9]


def test_what_is_wrong_in_a_directory_is_reported_before_the_server_starts(tmp_path: Path, model: Path) -> None:
    (model / "serving.properties").write_text("option.max_input_len=many\n")
    with pytest.raises(ConfigError, match="max_input_len=many"):
        plan_startup(str(model), {})
    with pytest.raises(LayoutError, match="no model at"):
        plan_startup(str(tmp_path / "nowhere"), {})


def test_a_remote_model_is_fetched_while_the_server_listens(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    opened: list[tuple[str, Mapping[str, str], Sequence[str]]] = []

    def open_remote(text: str, environ: Mapping[str, str], arguments: Sequence[str]) -> str:
        opened.append((text, environ, arguments))
        return "source"

    monkeypatch.setattr(startup, "open_remote", open_remote)
    monkeypatch.setattr(startup, "prepare", lambda source: f"prepared {source}")
    environ = {"OPTION_PREDICT_TIMEOUT": "77"}
    options, [planned], store = plan_startup("acme/tiny-stories", environ, ["max_rolling_batch_size=3"])
    assert (planned.name, planned.source, options.predict_timeout, store) == (
        "acme_tiny_stories",
        "acme/tiny-stories",
        77,
        None,
    )
    assert opened == []
    assert str(planned.prepare()) == "prepared source"
    assert opened == [("acme/tiny-stories", environ, ["max_rolling_batch_size=3"])]


def test_a_remote_model_may_be_named() -> None:
    _, [startup], _ = plan_startup("acme/tiny-stories", {"OPTION_MODEL_NAME": "fable"})
    assert startup.name == "fable"


def test_a_model_may_come_with_a_store(model: Path, store: Path) -> None:
    for named in (str(model), "acme/tiny-stories"):
        _, planned, found = plan_startup(named, {"SERVING_MODEL_STORE": str(store)})
        assert (len(planned), found) == (1, store)


def test_without_model_and_store_there_is_nothing_to_serve() -> None:
    with pytest.raises(DjlTrtllmError, match="no model given, and there is none in /opt/ml/model: name a model dir"):
        plan_startup(None, {})


# -- a model by a variable, as in DJL Serving --------------------------------------------------------------------------


def test_what_was_found_is_served_unless_something_is_named(tmp_path: Path, model: Path) -> None:
    _, [startup], _ = plan_startup(None, {}, found=str(model))
    assert startup.source == str(model)
    other = scripted_model(tmp_path / "other")
    _, [startup], _ = plan_startup(str(other), {"SERVING_LOAD_MODELS": f"a={model}"}, found=str(model))
    assert startup.source == str(other)


@pytest.mark.parametrize("entry", ["fable::MPI={}", "fable::Python={}", "fable={}", "[fable:1:MPI:*]=file://{}"])
def test_a_model_at_the_address_of_load_models(model: Path, entry: str) -> None:
    options, [startup], store = plan_startup(None, {"SERVING_LOAD_MODELS": entry.format(model)}, found="acme/other")
    assert (startup.name, startup.source, options.predict_timeout, store) == ("fable", str(model), 77, None)
    assert startup.prepare().name == "fable"


@pytest.mark.parametrize("variable", ["OPTION_MODEL_ID", "HF_MODEL_ID"])
@pytest.mark.parametrize("there", [True, False])
def test_an_empty_folder_stands_for_the_model_that_a_variable_names(
    tmp_path: Path, model: Path, variable: str, there: bool
) -> None:
    """`SERVING_LOAD_MODELS=name::MPI=/opt/ml/model` beside OPTION_MODEL_ID: DJL Serving fills an empty folder so."""
    empty = tmp_path / "empty"
    if there:
        empty.mkdir()
    environ = {"SERVING_LOAD_MODELS": f"fable::MPI={empty}", variable: str(model)}
    _, [startup], _ = plan_startup(None, environ, found=str(model))
    assert startup.name == startup.prepare().name == "fable"
    assert startup.source == str(model)


def test_a_remote_model_by_a_variable_has_the_name_of_load_models(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(startup, "open_remote", lambda text, environ: open_source(model, environ))
    environ = {"SERVING_LOAD_MODELS": f"fable::MPI={model / 'nowhere'}", "OPTION_MODEL_ID": "acme/tiny"}
    _, [planned], _ = plan_startup(None, environ, found="acme/tiny")
    assert (planned.name, planned.source) == ("fable", "acme/tiny")
    assert open_source(model, {}).name == "scripted"


def test_several_models_at_addresses(tmp_path: Path) -> None:
    red, blue = scripted_model(tmp_path / "red"), scripted_model(tmp_path / "blue")
    environ = {"SERVING_LOAD_MODELS": f"a::MPI={red}, b={blue}", "HF_MODEL_ID": "acme/elsewhere"}
    _, planned, _ = plan_startup(None, environ, found="acme/elsewhere")
    assert [(each.name, each.source) for each in planned] == [("a", str(red)), ("b", str(blue))]
    assert [each.prepare().directory for each in planned] == [red, blue]


# -- a store -----------------------------------------------------------------------------------------------------------


def names(store: Path, **environ: str) -> list[str]:
    _, planned, _ = plan_startup(None, {"SERVING_MODEL_STORE": str(store), **environ})
    return [each.name for each in planned]


@pytest.mark.parametrize(
    ("wanted", "loaded"),
    [
        ("ALL", ["blue", "packed", "red"]),
        ("all", ["blue", "packed", "red"]),
        ("NONE", []),
        ("none", []),
        ("red", ["red"]),
        ("red, packed.tar.gz,", ["red", "packed"]),
    ],
)
def test_models_of_the_store_are_loaded_as_load_models_says(store: Path, wanted: str, loaded: list[str]) -> None:
    assert names(store, SERVING_LOAD_MODELS=wanted) == loaded


def test_models_of_a_store_are_registered_when_they_are_asked_for(store: Path) -> None:
    options, planned, found = plan_startup(None, {"SERVING_MODEL_STORE": str(store), "OPTION_PREDICT_TIMEOUT": "77"})
    assert (options.predict_timeout, planned, found) == (77, [], store)


def test_models_of_a_store_are_prepared_as_what_they_are(store: Path) -> None:
    environ = {"SERVING_MODEL_STORE": str(store), "SERVING_LOAD_MODELS": "red", "HF_MODEL_ID": "acme/elsewhere"}
    _, [startup], _ = plan_startup(None, environ)
    assert startup.source == str(store / "red")
    prepared: Model = startup.prepare()
    assert prepared.directory == store / "red"


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("green", "load_models names green: in {store} are blue, packed.tar.gz, red"),
        ("red,green,grey", "load_models names green, grey: in {store} are blue, packed.tar.gz, red"),
        ("README.txt", "load_models names README.txt: in {store} are blue, packed.tar.gz, red"),
    ],
)
def test_what_is_not_in_the_store_is_reported(store: Path, wanted: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        names(store, SERVING_LOAD_MODELS=wanted)
    assert refused.value.problems == (told.format(store=store),)


def test_an_empty_store_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are none"):
        names(tmp_path, SERVING_LOAD_MODELS="red")


def test_a_store_that_is_not_there_is_reported(model: Path) -> None:
    environ = {"SERVING_MODEL_STORE": "/no/such/folder"}
    with pytest.raises(ConfigError, match=r"SERVING_MODEL_STORE=/no/such/folder \(environment\): there is no such fol"):
        plan_startup(str(model), environ)


def test_an_empty_variable_is_none(model: Path) -> None:
    assert plan_startup(str(model), {"SERVING_MODEL_STORE": ""})[2] is None


# -- SageMaker's multi-model endpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["true", "True"])
def test_a_multi_model_endpoint_has_no_model_of_its_own(model: Path, word: str) -> None:
    _, planned, store = plan_startup(str(model), {"SAGEMAKER_MULTI_MODEL": word})
    assert (planned, store) == ([], Path("/opt/ml/models"))
    _, planned, store = plan_startup(None, {"SAGEMAKER_MULTI_MODEL": word})
    assert (planned, store) == ([], Path("/opt/ml/models"))


def test_a_multi_model_endpoint_may_have_another_store(store: Path) -> None:
    environ = {"SAGEMAKER_MULTI_MODEL": "true", "SERVING_MODEL_STORE": str(store)}
    assert plan_startup(None, environ)[2] == store


def test_any_other_endpoint_has_one_model(model: Path) -> None:
    _, planned, store = plan_startup(str(model), {"SAGEMAKER_MULTI_MODEL": "false"})
    assert (len(planned), store) == (1, None)

"""What a server is started with."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from djl_trtllm import create_app
from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, DjlTrtllmError, LayoutError
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.application import Application, Startup, plan_startup
from djl_trtllm.service.model import Model, open_source
from tests.server.application import body
from tests.support.asgi import Client, lifespan
from tests.support.in_process import Hosts, played_model
from tests.support.models import scripted_model
from tests.support.tables import by_table
from tests.support.virtual_time import until

MODEL = "djl_trtllm.service.model"


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


STORE = {"SERVING_MODEL_STORE": "{store}"}


@pytest.mark.usefixtures("hosts")  # files of the store are read here
@by_table("given", "environ", "found", "models", "folder")
def test_what_is_served(
    model: Path,
    store: Path,
    given: str | None,
    environ: dict[str, str],
    found: str | None,
    models: dict[str, str],
    folder: str | None,
) -> None:
    def here(text: str | None) -> str | None:
        return None if text is None else text.format(model=model, store=store)

    own = {name: str(here(value)) for name, value in environ.items()}
    options, planned, path = plan_startup(here(given), own, found=here(found))
    assert {each.name: each.source for each in planned} == {name: here(source) for name, source in models.items()}
    assert (None if path is None else str(path)) == here(folder)
    assert options.predict_timeout == (77 if list(models.values()) == ["{model}"] else Options().predict_timeout)
    for each in planned:
        if Path(each.source).is_dir():
            assert each.prepare().directory == Path(each.source)


@by_table("given", "environ", "told")
def test_what_cannot_be_served_is_reported_before_the_server_starts(
    model: Path, store: Path, given: str | None, environ: dict[str, str], told: str
) -> None:
    own = {name: value.format(model=model, store=store) for name, value in environ.items()}
    with pytest.raises(DjlTrtllmError) as refused:
        plan_startup(given and given.format(model=model), own)
    assert told.format(store=store) in str(refused.value)


def test_what_is_wrong_in_a_directory_is_reported_before_the_server_starts(model: Path) -> None:
    (model / "serving.properties").write_text("option.max_input_len=many\n")
    with pytest.raises(ConfigError, match="max_input_len=many"):
        plan_startup(str(model), {})


@pytest.mark.usefixtures("hosts")
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


def test_a_remote_model_is_fetched_while_the_server_listens(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    opened: list[tuple[str, Mapping[str, str], Sequence[str]]] = []

    def open_remote(text: str, environ: Mapping[str, str], arguments: Sequence[str], calls: str) -> str:
        opened.append((text, environ, arguments))
        return f"source read {calls}"

    monkeypatch.setattr(f"{MODEL}.open_remote", open_remote)
    monkeypatch.setattr(f"{MODEL}.prepare_apart", lambda path, opened: f"{path}: {opened(calls='apart')}")
    environ = {"OPTION_PREDICT_TIMEOUT": "77"}
    options, [planned], store = plan_startup("acme/tiny-stories", environ, ["max_rolling_batch_size=3"])
    assert (planned.name, planned.source, options.predict_timeout, store) == (
        "acme_tiny_stories",
        "acme/tiny-stories",
        77,
        None,
    )
    assert opened == []
    assert str(planned.prepare()) == "acme/tiny-stories: source read apart"
    assert opened == [("acme/tiny-stories", environ, ["max_rolling_batch_size=3"])]


@pytest.mark.parametrize(
    ("option", "apart"),
    [("model_id", True), ("tokenizer", True), ("speculative_draft_model", True), ("revision", False)],
)
def test_what_a_directory_takes_from_the_hub_is_read_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, apart: bool
) -> None:
    monkeypatch.setattr(f"{MODEL}.prepare_apart", lambda path, opened: ("apart", opened(calls=None).name))
    monkeypatch.setattr(f"{MODEL}.prepare", lambda source: ("here", source.name))
    directory = scripted_model(tmp_path / "story", None, **{f"option.{option}": "acme/tiny-stories"})
    _, [planned], _ = plan_startup(str(directory), {})
    assert str(planned.prepare()) == str(("apart" if apart else "here", planned.name))


@pytest.mark.parametrize("variable", ["OPTION_MODEL_ID", "HF_MODEL_ID"])
@pytest.mark.parametrize("there", ["store/nowhere", "store/empty", "store/red", "red.tar"])
def test_an_empty_folder_stands_for_the_model_that_a_variable_names(
    tmp_path: Path, store: Path, model: Path, variable: str, there: str
) -> None:
    """`SERVING_LOAD_MODELS=name::MPI=/opt/ml/model` beside OPTION_MODEL_ID: DJL Serving fills an empty folder so."""
    (store / "empty").mkdir()
    shutil.make_archive(str(tmp_path / "red"), "tar", shutil.copytree(store / "red", tmp_path / "copy"))
    environ = {"SERVING_LOAD_MODELS": f"fable::MPI={tmp_path / there}", variable: str(model)}
    _, [startup], _ = plan_startup(None, environ, found=str(model))
    assert startup.name == startup.prepare().name == "fable"
    assert startup.source == str(tmp_path / there if "red" in there else model)


def test_a_remote_model_by_a_variable_has_the_name_of_load_models(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(f"{MODEL}.open_remote", lambda text, environ: open_source(model, environ))
    environ = {"SERVING_LOAD_MODELS": f"fable::MPI={model / 'nowhere'}", "OPTION_MODEL_ID": "acme/tiny"}
    _, [planned], _ = plan_startup(None, environ, found="acme/tiny")
    assert (planned.name, planned.source) == ("fable", "acme/tiny")
    assert open_source(model, {}).name == "scripted"


# The application's life under any ASGI server; what the server process does with it is in test_app.


@pytest.fixture(autouse=True)
def _of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is for a process of the server's own is not done to that of the tests."""
    monkeypatch.setattr("djl_trtllm.service.engine.settle_garbage_collector", lambda: None)


def preparing(tokenizer: Tokenizer, name: str = "story", **options: Any) -> Startup:
    return Startup(name, f"/{name}", lambda: played_model(tokenizer, **options))


def failing() -> Startup:
    def prepare() -> Model:
        raise LayoutError("there is no model")

    return Startup("broken", "/broken", prepare)


async def started(app: Application) -> Message:
    """What the lifespan's start ends with."""
    received: asyncio.Queue[Message] = asyncio.Queue()
    sent: asyncio.Queue[Message] = asyncio.Queue()
    received.put_nowait({"type": "lifespan.startup"})
    life = asyncio.ensure_future(app({"type": "lifespan"}, received.get, sent.put))
    await asyncio.wait({life}, timeout=60)
    return sent.get_nowait()


async def test_the_start_does_not_wait_for_models(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.load_seconds = 10
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (left := tmp_path / "djl-trtllm-0123456789ab").mkdir()  # by a server that was killed
    os.utime(left, (0, 0))
    app = Application(Options(), [preparing(tokenizer)])
    async with lifespan(app):
        assert (await Client(app).get("/ping")).status == 503
        await asyncio.sleep(11)
        assert (await Client(app).get("/ping")).status == 200
    for thread in threading.enumerate():
        if thread.name == "sweep":
            thread.join()
    assert not left.exists()


async def test_the_start_waits_for_models_where_that_is_wanted(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.load_seconds = 10
    app = Application(Options(), [preparing(tokenizer)], wait_until_ready=True)
    async with lifespan(app):
        assert asyncio.get_running_loop().time() > 9
        assert (await Client(app).get("/ping")).status == 200


async def test_a_start_that_waits_fails_with_the_model(hosts: Hosts, tokenizer: Tokenizer) -> None:
    message = await started(Application(Options(), [preparing(tokenizer), failing()], wait_until_ready=True))
    assert message["type"] == "lifespan.startup.failed"
    assert "there is no model" in message["message"]
    assert [host.closed for host in hosts.made] == [True]


async def test_a_model_that_does_not_load_is_reported(hosts: Hosts) -> None:
    reported: list[bool] = []
    app = Application(Options(), [failing()], on_failed=lambda: reported.append(True))
    async with lifespan(app):
        await until(lambda: bool(reported))
        assert (await Client(app).get("/ping")).status == 500


async def test_the_end_refuses_new_requests_and_lets_running_ones_end(hosts: Hosts, tokenizer: Tokenizer) -> None:
    app = Application(Options(shutdown_timeout=60), [preparing(tokenizer)], wait_until_ready=True)
    client = Client(app)
    async with lifespan(app):
        request = client.begin("POST", "/invocations", body(1))
        await until(lambda: bool(hosts.last.submitted))

        async def later() -> None:
            await asyncio.sleep(5)
            refused.append((await client.post("/invocations", body())).headers["connection"])
            hosts.last.step()

        refused: list[str] = []
        ending = asyncio.ensure_future(later())
    await ending
    assert refused == ["close"]
    assert (await request.end()).status == 200
    assert 5 <= asyncio.get_running_loop().time() < 20
    assert hosts.last.closed


async def test_draining_again_waits_for_the_same_end(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.load_seconds = 60
    app = Application(Options(), [preparing(tokenizer)])
    async with lifespan(app):
        await until(lambda: bool(hosts.made))
        await asyncio.gather(app.drain(), app.drain())
        assert hosts.last.closed
    assert asyncio.get_running_loop().time() < 30


def test_wrong_options_of_access_are_an_error_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="management_port"):
        Application(Options(port=8080, management_port=8080), [])


# -- how late the event loop is ----------------------------------------------------------------------------------------


async def test_stalls_of_the_event_loop_are_counted() -> None:
    app = Application(Options(), [])
    loop = asyncio.get_running_loop()

    async def metric(name: str) -> float:
        page = (await Client(app).get("/metrics")).body.decode()
        (line,) = [line for line in page.splitlines() if line.startswith(f"djl_trtllm_event_loop_stall_seconds_{name}")]
        return float(line.split()[-1])

    async with lifespan(app):
        await asyncio.sleep(1.01)
        assert await metric("count") == 50
        assert await metric("sum") < 1e-6
        loop.now += 0.5  # type: ignore[attr-defined]
        await asyncio.sleep(0.001)
        assert await metric("sum") == pytest.approx(0.49)


async def test_options_win_over_the_models_file_and_the_environment(
    tmp_path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scripted_model(tmp_path / "story", None, **{"option.model_name": "red", "max_request_size": 100})
    monkeypatch.setenv("SERVING_MAX_REQUEST_SIZE", "200")
    app = create_app(model, {"model_name": "blue", "max_request_size": 300}, wait_until_ready=True)
    async with lifespan(app):
        assert list((await Client(app).get("/ping")).json) == ["blue"]
        assert (await Client(app).post("/invocations", b" " * 301)).status == 413
        assert (await Client(app).post("/invocations", b" " * 300)).status != 413


def test_what_is_no_option_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean max_input_len"):
        create_app(scripted_model(tmp_path / "story"), {"max_input_length": 5})


def test_the_environment_names_the_model_if_the_program_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DjlTrtllmError, match="no model given"):
        create_app()
    monkeypatch.setenv("OPTION_MODEL_ID", "acme/blue")
    assert list(create_app().registry.models) == ["acme_blue"]
    monkeypatch.setenv("HF_MODEL_ID", "acme/green")
    assert list(create_app().registry.models) == ["acme_green"]
    monkeypatch.setenv("SERVING_LOAD_MODELS", f"red={scripted_model(tmp_path / 'story')}")
    assert list(create_app().registry.models) == ["red"]

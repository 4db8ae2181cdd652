"""What clients and model stores bring on a bad day, again and again beside streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from tests.faults.load import Case, Load, Row, row_of
from tests.support.client import HANDSHAKE, body, read_all
from tests.support.hostile import GUIDE_BOMBS
from tests.support.hostile_models import HOSTILE, LARGE, LOOP, OTHERS, write_hostile, write_large
from tests.support.models import PROMPT, write_adapter
from tests.support.server import Server

_LARGE_SECONDS = 90.0
"""Seconds of /pings after a model that is loaded once, so that a thousandth of more than 3,000 /pings are several."""


def _again(case: Case, act: Callable[[int], None]) -> Callable[[Load], None]:
    """Do it until the time is over; once in the short form."""

    def cause(load: Load) -> None:
        end = time.monotonic() + (0 if case.short else case.seconds)
        number = 0
        while number == 0 or time.monotonic() < end:
            act(number)
            number += 1
        load.wait_for_parts(2 * load.streams)

    return cause


# -- models that are registered ----------------------------------------------------------------------------------------


def hostile_models(case: Case) -> Iterator[Row]:
    store = case.folder / "store"
    store.mkdir()
    names = (*HOSTILE, *OTHERS, LOOP)
    write_hostile(store)
    with case.server(SERVING_MODEL_STORE=str(store)) as server:

        def register(name: str) -> Callable[[int], None]:
            def act(_: int) -> None:
                answer = server.http.post("/models", params={"url": name, "model_name": "m"})
                assert answer.status_code >= 400 and len(answer.content) < 10_000, answer.text
                assert answer.status_code == 400 or name != LOOP, answer.text

            return act

        for name in names:
            yield row_of(f"{name}: registered", case.engine, server, case.streams, _again(case, register(name)))

        write_large(store)

        def load_large(load: Load) -> None:
            assert server.http.post("/models", params={"url": LARGE, "model_name": "m"}).status_code == 200
            assert server.http.delete("/models/m").status_code == 200
            time.sleep(_LARGE_SECONDS)
            load.wait_for_parts(2 * load.streams)

        yield row_of(f"{LARGE}: loaded once", case.engine, server, case.streams, load_large)


_LAYERS = 40_000


def large_adapter(case: Case) -> Iterator[Row]:
    adapter = write_adapter(case.folder / "adapters" / "large")
    _write_weights(adapter / "adapter_model.safetensors")
    lora = {"OPTION_ENABLE_LORA": "true", "OPTION_LORA_TARGET_MODULES": "attn_q"}
    with case.server(SERVING_ADAPTER_ROOTS=str(adapter.parent), **lora) as server:

        def act(_: int) -> None:
            answer = server.http.post("/adapters", params={"name": "large", "src": str(adapter)})
            assert answer.status_code == 400, answer.text  # the model has not as many layers

        name = f"an adapter of {_LAYERS:,} layers"
        yield row_of(name, case.engine, server, case.streams, _again(case, act))


def _write_weights(path: Path) -> None:
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensor = {"dtype": "F16", "shape": [8, 8], "data_offsets": [0, 128]}
    header = json.dumps({name.format(layer, side): tensor for layer in range(_LAYERS) for side in "AB"}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(128))


# -- requests ----------------------------------------------------------------------------------------------------------

_SOCKETS = 400
_LONG_NAME = json.dumps({"model": "x" * 5_000_000, "prompt": "a"}).encode()
_CHUNKED = b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
_PAIRS = 20


def hostile_requests(case: Case) -> Iterator[Row]:
    with case.server() as server:
        for name, act in (
            (f"a client opens {_SOCKETS} WebSockets", _open_sockets),
            ("a model's name of 5 MB", _name_a_model),
            ("a good and a damaged chunked request", _send_pairs),
        ):

            def acted(_: int, act: Callable[[Server], None] = act) -> None:
                act(server)

            yield row_of(name, case.engine, server, case.streams, _again(case, acted))


def _open_sockets(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(server.connect()) for _ in range(_SOCKETS)]
        for each in sockets:
            each.sendall(HANDSHAKE + b"\r\n")
        statuses = [each.recv(12)[-3:] for each in sockets]
    assert {*statuses} == {b"101", b"503"}, {*statuses}


def _name_a_model(server: Server) -> None:
    answer = server.http.post("/v1/completions", content=_LONG_NAME)
    assert answer.status_code == 404 and len(answer.content) < 10_000


def _send_pairs(server: Server) -> None:
    content = body(2)
    good = _CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    for _ in range(_PAIRS):
        with server.connect() as connection:
            connection.sendall(good + _CHUNKED + b"nonsense\r\n")
            received = read_all(connection)
        assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"], received[-300:]


# -- guides ------------------------------------------------------------------------------------------------------------

_BOMBS = 12


def guide_bombs(case: Case) -> Iterator[Row]:
    seconds = 1 if case.short else case.seconds
    with case.server(SERVING_CLIENT_HEADER="x-client") as server:
        for kind, bomb in GUIDE_BOMBS.items():

            def act(number: int, bomb: Callable[[int], str] = bomb) -> None:
                asyncio.run(_send_bombs(server, [bomb(number * _BOMBS + each) for each in range(_BOMBS)], seconds))

            yield row_of(f"{_BOMBS} guides: {kind}", case.engine, server, case.streams, _again(case, act))


async def _send_bombs(server: Server, guides: list[str], seconds: float) -> None:
    """Each guide from a client of its own, which leaves when the time is over."""
    async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as http:
        asked = [
            asyncio.ensure_future(
                http.post(
                    "/invocations",
                    json={"inputs": PROMPT, "parameters": {"max_new_tokens": 4, "guided_regex": guide}},
                    headers={"x-client": f"bomb {number}"},
                )
            )
            for number, guide in enumerate(guides)
        ]
        await asyncio.wait(asked, timeout=seconds)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

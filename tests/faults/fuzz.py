"""`python -m tests.faults.fuzz [--requests N] [--archives N] [--seed S]`: requests of every dialect, and archives, made
by a grammar and then damaged. No answer is a 500, none is missing, and nothing of them is left.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import io
import json
import random
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.errors import ArchiveError
from djl_trtllm.model.archive import extract
from tests.support.client import raw_post
from tests.support.models import scripted_model
from tests.support.server import Server

_AT_ONCE = 16
_ANSWER_SECONDS = 60
_MEGABYTES_MORE = 64
_UNREAD_BYTES = 65_536
_WORDS = ("wolf", "", "\0", "🦊", "a" * 3000, "\\", '"', "[[[", "</s>", "null", "-1", "1e999", "../x")
_LEAVES: tuple[Any, ...] = (None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, *_WORDS)
_HEADERS = (
    "Accept: text/event-stream",
    "Content-Type: text/plain",
    "Content-Type: application/octet-stream",
    "Content-Encoding: gzip",
    "Inference-Header-Content-Length: 5",
    "X-Amzn-SageMaker-Custom-Attributes: content-length=9;a=b",
    "X-Amzn-SageMaker-Session-Id: NEW_SESSION",
    "X-Amzn-SageMaker-Target-Model: x.tar.gz",
    "X-Request-Id: \t\x7f",
    "Accept-Encoding: gzip",
)


def targets() -> list[tuple[str, list[str]]]:
    """Every path that takes a body, and the names of the parameters there."""
    found = []
    for dialect in DIALECTS:
        for path in (*dialect.paths, *dialect.actions):
            names = {name for table in dialect.tables.get(path, ()) for name in _names(table.schema())}
            url = path.replace("{version}", "1").replace("{model}", "scripted")
            found.append((url.replace("{endpoint}", "e").replace("{component}", "c"), sorted(names)))
    return found


def _names(schema: Any) -> Iterator[str]:
    for part in schema.get("anyOf", [schema]):
        for name, member in part.get("properties", {}).items():
            yield name
            yield from _names(member)


class Grammar:
    """Makes bodies. Every one follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self._targets = targets()

    def request(self) -> tuple[str, bytes, list[str]]:
        """Path, body and headers."""
        source = self.source
        path, names = source.choice(self._targets)
        body = json.dumps(self._body(path, names)).encode()
        if source.random() < 0.3:
            body = damaged(source, body)
        headers = [source.choice(_HEADERS)] if source.random() < 0.2 else []
        return path, body, headers

    def _body(self, path: str, names: list[str]) -> Any:
        source = self.source
        if source.random() < 0.05:
            return self._value(0)
        messages = [{"role": source.choice(("user", "system", "tool", "")), "content": source.choice(_WORDS)}]
        body: dict[str, Any] = {
            "inputs": "the wolf", "prompt": "the wolf", "text_input": "the wolf", "messages": messages, "max_tokens": 3,
        }  # fmt: skip
        if path.endswith("/infer"):
            shapes = [[1, 1], [1], [-1, 1], [2**63, 1], [[1]]]
            body = {
                "inputs": [
                    {"name": name, "shape": source.choice(shapes), "datatype": kind, "data": [value]}
                    for name, kind, value in (("text_input", "BYTES", "the wolf"), ("max_tokens", "INT32", 3))
                ]
            }
        body = {name: value for name, value in body.items() if name in names or path.endswith("/infer")}
        chosen = {name: self._value(0) for name in source.sample(names, min(len(names), source.randrange(4)))}
        chosen.setdefault("max_new_tokens" if "max_new_tokens" in names else "max_tokens", 3)
        if "parameters" in names and source.random() < 0.8:
            body["parameters"] = {name: value for name, value in chosen.items() if name not in body}
            body.pop("max_tokens", None)
        else:
            body |= {name: value for name, value in chosen.items() if name in names}
        return body

    def _value(self, depth: int) -> Any:
        source = self.source
        kind = source.random()
        if depth > 4 or kind < 0.6:
            return source.choice(_LEAVES)
        count = source.choice((0, 1, 2, 3, 70))
        if kind < 0.8:
            return [self._value(depth + 1)] * count
        return {source.choice((*_WORDS, "type", "json", "function", "name", "text")): self._value(depth + 1)}


def damaged(source: random.Random, data: bytes) -> bytes:
    """The bytes with one thing wrong."""
    at = source.randrange(len(data) + 1)
    match source.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([source.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + data[source.randrange(len(data) + 1) :]
        case 3:
            return (
                data[:at] + source.choice((b"[", b"{", b'"', b"9", b"\\")) * source.choice((1, 200, 5000)) + data[at:]
            )
        case _:
            return data * 2


@dataclass
class Outcome:
    """What came of the requests. `wrong` are those that broke a rule."""

    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


async def _answer(port: int, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        data = await reader.read()
    finally:
        writer.close()
    return int(data[9:12] or b"0"), data


async def _send(server: Server, grammar: Grammar, count: int, outcome: Outcome) -> None:
    left = iter(range(count))

    async def client() -> None:
        for number in left:
            path, body, headers = grammar.request()
            request = raw_post(body, "Connection: close", *headers, path=path)
            try:
                status, data = await asyncio.wait_for(_answer(server.port, request), _ANSWER_SECONDS)
            except (asyncio.TimeoutError, OSError, ValueError) as error:
                status, data = 0, repr(error).encode()
            outcome.statuses[status] += 1
            # A large body that nobody reads, because its headers are refused, may reset the connection.
            unread = b"ConnectionReset" in data and len(body) > _UNREAD_BYTES
            if status == 500 or (not 200 <= status < 600 and not unread):
                outcome.wrong.append(f"{status} {path} {headers} {body[:600]!r}: {data[-300:]!r}")
            if number in (count // 3, count - 1):
                outcome.memory.append(server.process.memory_info().rss >> 20)

    await asyncio.gather(*(client() for _ in range(_AT_ONCE)))


def fuzz_requests(count: int, seed: int = 0) -> Outcome:
    """Send so many requests to a server, and look at what is left."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        model = scripted_model(Path(folder) / "model", {"steps_per_second": 5000}, **{"option.max_output_len": 64})
        with Server(model) as server:
            server.wait_for_ping()
            server.note_rest()
            asyncio.run(_send(server, Grammar(seed), count, outcome))
            server.check_leaks()
            if server.ping() != 200:
                outcome.wrong.append(f"/ping is {server.ping()}")
            if server.says("Traceback"):
                outcome.wrong.append("\n".join(server.log[-40:]))
            if len(outcome.memory) == 2 and outcome.memory[1] > outcome.memory[0] + _MEGABYTES_MORE:
                outcome.wrong.append(f"the server grew from {outcome.memory[0]} MB to {outcome.memory[1]} MB")
    return outcome


_KINDS = (*[tarfile.REGTYPE] * 6, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE,
          tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, b"\xff")  # fmt: skip
_PATHS = (
    "config.json",
    "a/b",
    "../x",
    "/etc/x",
    "a/../../x",
    "a" * 300,
    "d/" * 40 + "x",
    "",
    ".",
    "a\0b",
    "ü\udcff",
    "a",
)


def hostile_archive(source: random.Random) -> bytes:
    """A tar of random members, which may be compressed, and is damaged every other time."""
    target = io.BytesIO()
    mode = source.choice(("w", "w:gz", "w:bz2", "w:xz"))
    with tarfile.open(fileobj=target, mode=mode, format=source.choice((0, 1, 2))) as tar:  # type: ignore[call-overload]
        for _ in range(source.randrange(6)):
            info = tarfile.TarInfo(source.choice(_PATHS))
            info.type, info.linkname = source.choice(_KINDS), source.choice(_PATHS)
            info.size = source.choice((0, 1, 512, 5000, 2**40)) if source.random() < 0.1 else 10
            info.mode, info.pax_headers = source.randrange(0o10000), {"path": "x"} if source.random() < 0.1 else {}
            try:
                tar.addfile(info, io.BytesIO(bytes(10)) if info.size == 10 and info.isreg() else None)
            except (ValueError, OverflowError, OSError):
                continue  # this format cannot say it
    data = target.getvalue()
    return damaged(source, data) if source.random() < 0.5 else data


def fuzz_archives(count: int, seed: int = 0) -> list[str]:
    """Extract so many archives; what was wrong."""
    source, wrong = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number in range(count):
            packed, into = root / "m.tar.gz", root / "inner" / str(number)
            packed.write_bytes(hostile_archive(source))
            try:
                extract(packed, into)
            except ArchiveError:
                if into.exists():
                    wrong.append(f"archive {number} of seed {seed} is refused, and there")
            except BaseException as error:
                wrong.append(f"archive {number} of seed {seed}: {error!r}")
        if {path.name for path in root.iterdir()} > {"m.tar.gz", "inner"}:
            wrong.append(f"written outside: {list(root.iterdir())}")
    return wrong


def main() -> int:
    """Print what came of it; 1 if a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--archives", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    wrong = fuzz_archives(given.archives, given.seed)
    outcome = fuzz_requests(given.requests, given.seed)
    wrong += outcome.wrong
    print(f"{given.archives} archives and {given.requests} requests in {time.monotonic() - began:.0f} s: "
          f"{dict(sorted(outcome.statuses.items()))}, {outcome.memory} MB")  # fmt: skip
    print(*wrong[:20], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())

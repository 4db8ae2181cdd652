"""What tests ask of a server or a cluster at a port of this machine."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import psutil

from tests.support.client import JSON, Answer, body, exchange, lmi


class Reachable:
    """A port with a client of it."""

    process: psutil.Popen
    """It and its children are what listens and works there."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = self._client()

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=300, trust_env=False)

    def ping(self) -> int:
        """Status of /ping; 0 while nobody listens."""
        try:
            return self.http.get("/ping").status_code
        except httpx.TransportError:
            return 0

    def generate(self, tokens: int = 4, *, stream: bool = False, **parameters: Any) -> httpx.Response:
        """A request for a number of tokens, to its end."""
        return self.http.post("/invocations", content=body(tokens, stream=stream, **parameters), headers=JSON)

    def post(self, inputs: str, *, stream: bool = False, **parameters: Any) -> httpx.Response:
        """A request, to its end."""
        return self.http.post("/invocations", json=lmi(inputs, stream=stream, **parameters))

    def answer(self, inputs: str, **parameters: Any) -> dict[str, Any]:
        """The whole answer to one request, with details."""
        answer = self.post(inputs, **{"details": True, **parameters})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def token_ids(self, inputs: str, **parameters: Any) -> list[int]:
        """The tokens of the answer to one request."""
        return [token["id"] for token in self.answer(inputs, **parameters)["details"]["tokens"]]

    def together(self, requests: list[dict[str, Any]], *, at_once: int = 64) -> list[Answer]:
        """Send requests, `at_once` of them at a time, and read all answers."""

        async def send() -> list[Answer]:
            places = asyncio.Semaphore(at_once)

            async def one(request: dict[str, Any]) -> Answer:
                async with places:
                    return await exchange(self.port, request)

            return await asyncio.gather(*map(one, requests))

        return asyncio.run(send())

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A raw connection."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(300)
        connection.connect(("127.0.0.1", self.port))
        return connection

"""The server's end of a host that runs in this process."""

from __future__ import annotations

import socket

from djl_trtllm.executor.protocol import Deframer, Delta, FromEngine, Step, Submit, ToEngine, decode_from_engine, frame
from djl_trtllm.request import Sampling


class Server:
    """The other end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._deframer = Deframer()
        self._messages: list[FromEngine] = []
        connection.settimeout(60)

    def send(self, *messages: ToEngine) -> None:
        self.connection.sendall(b"".join(frame(message) for message in messages))

    def receive(self) -> FromEngine:
        while not self._messages:
            data = self.connection.recv(65536)
            assert data, "the host closed its end"
            self._messages += [decode_from_engine(body) for body in self._deframer.feed(data)]
        return self._messages.pop(0)

    def rest(self) -> list[FromEngine]:
        """All that was sent before the host closed its end."""
        while data := self.connection.recv(65536):
            self._messages += [decode_from_engine(body) for body in self._deframer.feed(data)]
        messages, self._messages = self._messages, []
        return messages

    def deltas(self, ends: int) -> list[Delta]:
        """Everything up to the `ends`-th terminal delta."""
        deltas: list[Delta] = []
        while ends:
            message = self.receive()
            if isinstance(message, Step):
                deltas += message.deltas
                ends -= sum(bool(delta.finish) for delta in message.deltas)
        return deltas


def request(request_id: int, tokens: int = 3, origin: str = "") -> Submit:
    return Submit(request_id, [5, 6, 7], Sampling(tokens), origin=origin)

"""The server's end of a host that runs in this process."""

from __future__ import annotations

import socket

from djl_trtllm.executor.protocol import (
    Deframer,
    Delta,
    FromHost,
    Sampling,
    Step,
    Submit,
    ToHost,
    decode_from_host,
    frame,
)


class Server:
    """The other end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._deframer = Deframer()
        self._messages: list[FromHost] = []
        connection.settimeout(60)

    def send(self, *messages: ToHost) -> None:
        self.connection.sendall(b"".join(frame(message) for message in messages))

    def receive(self) -> FromHost:
        while not self._messages:
            data = self.connection.recv(65536)
            assert data, "the host closed its end"
            self._messages += [decode_from_host(body) for body in self._deframer.feed(data)]
        return self._messages.pop(0)

    def rest(self) -> list[FromHost]:
        """All that was sent before the host closed its end."""
        while data := self.connection.recv(65536):
            self._messages += [decode_from_host(body) for body in self._deframer.feed(data)]
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


def request(request_id: int, tokens: int = 3) -> Submit:
    return Submit(request_id, [5, 6, 7], Sampling(tokens))

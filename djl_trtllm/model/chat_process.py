"""The process that renders chat templates: `python -m djl_trtllm.model.chat_process FD`.

A template is a program that comes with the model, and messages are its input. Here one that loops, or takes all memory,
ends nothing but this process. Messages of either direction begin with their length. The first one has the templates;
each further one has a conversation, to which the response is `RENDERED` or `REFUSED` with a text.
"""

from __future__ import annotations

import pickle
import socket
import sys

from djl_trtllm.child_process import allow_more_memory, leave_end_to_parent, write_no_core_file
from djl_trtllm.errors import InvalidRequestError, TokenizerError
from djl_trtllm.model.chat_template import ChatTemplate

_MEMORY = 1024**3
"""Bytes that rendering may take."""

LENGTH_BYTES = 4
RENDERED = b"+"
REFUSED = b"-"


def framed(message: bytes) -> bytes:
    """A message with its length before it."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


def answer(template: ChatTemplate, message: bytes) -> bytes:
    """The response to a conversation."""
    messages, keywords = pickle.loads(message)  # noqa: S301  from the server
    try:
        return RENDERED + template.render(messages, **keywords).encode("utf-8", "surrogatepass")
    except InvalidRequestError as error:
        return REFUSED + str(error).encode("utf-8", "surrogatepass")
    except (TypeError, MemoryError) as error:
        return REFUSED + f"the model's chat template failed: {type(error).__name__}: {error}".encode()


def _read(connection: socket.socket) -> bytes:
    """The next message. Raises EOFError at the end."""
    return _read_bytes(connection, int.from_bytes(_read_bytes(connection, LENGTH_BYTES), "big"))


def _read_bytes(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def main(argv: list[str]) -> None:
    """Render until the server is gone."""
    leave_end_to_parent()
    write_no_core_file()
    allow_more_memory(_MEMORY)
    connection = socket.socket(fileno=int(argv[1]))
    try:
        sources, special_tokens, origin = pickle.loads(_read(connection))  # noqa: S301
        try:
            template = ChatTemplate(sources, special_tokens, origin)
        except TokenizerError:
            return  # the server has told it when it read the model
        connection.sendall(framed(RENDERED))
        while True:
            connection.sendall(framed(answer(template, _read(connection))))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main(sys.argv)

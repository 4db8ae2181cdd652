"""What the head of a request says of what follows it."""

from __future__ import annotations

import httptools

Fields = list[tuple[bytes, bytes]]


def announces_body(headers: Fields) -> bool:
    return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in headers)


def without_offer(parser: httptools.HttpRequestParser, url: bytes, headers: Fields) -> bytes:
    """The head that a parser has read, without its offer of another protocol: the parser reads no body behind that."""
    head = [parser.get_method(), b" ", url, b" HTTP/", parser.get_http_version().encode(), b"\r\n"]
    for name, value in headers:
        if name != b"upgrade":
            head += (name, b": ", value, b"\r\n")
    return b"".join([*head, b"\r\n"])

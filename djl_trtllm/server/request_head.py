"""What the head of a request says."""

from __future__ import annotations

import httptools

from djl_trtllm.api.headers import request_id
from djl_trtllm.telemetry import ServedRequest

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


def refused(method: bytes, url: bytes, headers: Fields, id_header: str) -> ServedRequest:
    """What is reported of a request that no application gets to see. Of its head there may be a part: what is not there
    is `-`. `id_header` is the name of the header with its id."""
    given = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    path = url.partition(b"?")[0].decode("latin-1")
    return ServedRequest(request_id(given, id_header), method.decode("latin-1") if path else "-", path or "-")

"""Reads the images of requests: from `data:` URLs, and from addresses of the hosts that the operator allows.

Work is bounded before it is done: the bytes of an image, the pixels in its header (`model/vision.py`), how many are
decoded at once, and the time. Nothing here runs on the event loop, and Pillow decodes without the GIL.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.model.vision import Vision, decode
from djl_trtllm.request import Image, ImageSource
from djl_trtllm.service.work import WorkerThreads

_DECODING = WorkerThreads(2)
"""The memory of decoding is bounded by their number."""
_FETCHING = WorkerThreads(8)
_FETCH_SECONDS = 10.0
_PIECE = 65_536
_HEADERS = {"Accept": "image/png, image/jpeg, image/webp, image/gif", "User-Agent": "djl-trtllm"}


async def read_images(sources: Sequence[ImageSource], vision: Vision, most_bytes: int) -> tuple[Image, ...]:
    """The images, with at most `most_bytes` in all. Raises InvalidRequestError, which names the content part."""
    images: list[Image] = []
    for source in sources:
        try:
            if source.url.startswith("data:"):
                read = partial(_decoded, source.url, most_bytes)
            else:
                read = partial(_checked, await _FETCHING.run(partial(_fetch, source.url, most_bytes)))
            data, width, height = await _DECODING.run(read)
            tokens = vision.tokens(width, height)
        except ValueError as error:
            raise InvalidRequestError(f"'{source.place}' is an image that cannot be read: {error}") from None
        most_bytes -= len(data)
        images.append(Image(data, width, height, tokens))
    return tuple(images)


def _checked(data: bytes) -> tuple[bytes, int, int]:
    """The file, and the size of its image. Raises ValueError."""
    return data, *decode(data).size


def _decoded(url: str, most_bytes: int) -> tuple[bytes, int, int]:
    """The same of a `data:` URL."""
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError("expected data:image/...;base64, and the file in base64")
    if len(text) * 3 // 4 > most_bytes:
        raise ValueError(_TOO_LARGE.format(most_bytes))
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"no base64 ({error})") from None
    return _checked(data)


_TOO_LARGE = "more than the {} bytes that the images of a request have left (max_request_size)"


# -- addresses ---------------------------------------------------------------------------------------------------------


def _fetch(address: str, most_bytes: int) -> bytes:
    """The file at an address, whose host the operator allows. Redirects are not followed. Raises ValueError."""
    url = urlsplit(address)
    connection = _Connection(url.hostname or "", url.port or _PORTS[url.scheme], tls=url.scheme == "https")
    try:
        target = url._replace(scheme="", netloc="", fragment="").geturl() or "/"
        connection.request("GET", target, headers=_HEADERS)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ValueError(f"its server answered with {response.status}; redirects are not followed")
        data = bytearray()
        while piece := response.read1(_PIECE):
            data += piece
            if len(data) > most_bytes:
                raise ValueError(_TOO_LARGE.format(most_bytes))
        return bytes(data)
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"it cannot be fetched within {_FETCH_SECONDS:g} seconds ({type(error).__name__})") from None
    finally:
        connection.close()


_PORTS = {"http": 80, "https": 443}


class _Connection(http.client.HTTPConnection):
    """A connection to a public address, without proxies, that ends after `_FETCH_SECONDS` whatever its server does."""

    def __init__(self, host: str, port: int, *, tls: bool) -> None:
        super().__init__(host, port, timeout=_FETCH_SECONDS)
        self._tls = tls
        self._end: threading.Timer | None = None

    def connect(self) -> None:
        # The address that was checked is the one that is connected to: a name may have another one a moment later.
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        for *_, address in found:
            if not ipaddress.ip_address(address[0]).is_global:
                raise ValueError(f"the host {self.host} has the address {address[0]}, which is not a public one")
        family, kind, protocol, _, address = found[0]
        self.sock = socket.socket(family, kind, protocol)
        self._end = threading.Timer(_FETCH_SECONDS, self._shut)
        self._end.daemon = True
        self._end.start()
        self.sock.settimeout(_FETCH_SECONDS)
        self.sock.connect(address)
        if self._tls:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)

    def close(self) -> None:
        if self._end is not None:
            self._end.cancel()
        super().close()

    def _shut(self) -> None:
        # Below TLS, whose own shutdown would wait for the server.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

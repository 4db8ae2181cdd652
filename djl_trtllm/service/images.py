"""Reads the images of requests: from `data:` URLs, and from addresses of the hosts that the operator allows.

Work is bounded before it is done: the bytes of a request's images, the pixels in their headers (`model/vision.py`), how
many are decoded at once, and the time. Nothing here runs on the event loop, and Pillow decodes without the GIL.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.model.vision import MOST_PIXELS, RefusedImageError, Vision, decode
from djl_trtllm.request import Image, ImageSource
from djl_trtllm.service.work import WorkerThreads

_DECODING = WorkerThreads(2)
"""Two threads, which bound the memory of decoding."""
_FETCHING = WorkerThreads(8)
_FETCH_SECONDS = 10.0
_PIECE = 65_536
_HEADERS = {"Accept": "image/png, image/jpeg, image/webp, image/gif", "User-Agent": "djl-trtllm"}


async def read_images(
    sources: Sequence[ImageSource], vision: Vision, most_bytes: int, refused: Counter[str]
) -> tuple[Image, ...]:
    """The images, with at most `most_bytes` and `MOST_PIXELS` in all. One that is not taken counts in `refused`.

    Raises InvalidRequestError, which names the content part.
    """
    images: list[Image] = []
    most_pixels = MOST_PIXELS
    for source in sources:
        try:
            if source.url.startswith("data:"):
                read = partial(_decoded, source.url, most_bytes, most_pixels)
            else:
                read = partial(_checked, await _FETCHING.run(partial(_fetch, source.url, most_bytes)), most_pixels)
            data, width, height = await _DECODING.run(read)
            tokens = vision.tokens(width, height)
        except ValueError as error:  # others than our own are of addresses
            refused[error.reason if isinstance(error, RefusedImageError) else "address"] += 1
            raise InvalidRequestError(f"'{source.place}' is an image that cannot be read: {error}") from None
        most_bytes -= len(data)
        most_pixels -= width * height
        images.append(Image(data, width, height, tokens))
    return tuple(images)


def _checked(data: bytes, most_pixels: int) -> tuple[bytes, int, int]:
    """The file, and the size of its image. Raises RefusedImageError."""
    return data, *decode(data, most_pixels).size


def _decoded(url: str, most_bytes: int, most_pixels: int) -> tuple[bytes, int, int]:
    """The file in a `data:` URL, and the size of its image. Raises RefusedImageError."""
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RefusedImageError("format", "expected data:image/...;base64, and the file in base64")
    if len(text) * 3 // 4 > most_bytes:
        raise RefusedImageError("size", _TOO_LARGE.format(most_bytes))
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise RefusedImageError("format", f"no base64 ({error})") from None
    return _checked(data, most_pixels)


_TOO_LARGE = "more than the {} bytes that the images of a request have left (max_request_size)"


# -- addresses ---------------------------------------------------------------------------------------------------------


def _fetch(address: str, most_bytes: int) -> bytes:
    """The file at an address, whose host the operator allows. Redirects are not followed. Raises RefusedImageError."""
    url = urlsplit(address)
    connection = _Connection(url.hostname or "", url.port, tls=url.scheme == "https")
    try:
        connection.request("GET", (url.path or "/") + (url.query and f"?{url.query}"), headers=_HEADERS)
        with connection.getresponse() as response:
            if response.status != http.client.OK:
                raise RefusedImageError(
                    "address", f"its server answered with {response.status}; redirects are not followed"
                )
            data = bytearray()
            while piece := response.read1(_PIECE):
                data += piece
                if len(data) > most_bytes:
                    raise RefusedImageError("size", _TOO_LARGE.format(most_bytes))
                connection.require_time()
        connection.require_time()  # a connection that was shut looks like the end of the file
        return bytes(data)
    except (OSError, http.client.HTTPException) as error:
        problem = f"it cannot be fetched within {_FETCH_SECONDS:g} seconds ({type(error).__name__})"
        raise RefusedImageError("address", problem) from None
    finally:
        connection.end()


class _Connection(http.client.HTTPConnection):
    """A connection to a public address, without proxies, that ends after `_FETCH_SECONDS` whatever its server does.

    `http.client` closes it, and forgets its socket, before it reads a body after which the server closes: `end` is what
    ends it.
    """

    def __init__(self, host: str, port: int | None, *, tls: bool) -> None:
        if tls:
            self.default_port = http.client.HTTPS_PORT
        super().__init__(host, port or self.default_port)  # without a port, it would find one in an IPv6 address
        self._tls = tls
        self._deadline = time.monotonic() + _FETCH_SECONDS
        self._open: socket.socket | None = None
        self._timer: threading.Timer | None = None

    def connect(self) -> None:
        # The address that was checked is the one that is connected to: a name may have another one a moment later.
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        for *_, address in found:
            if not _is_public(str(address[0])):
                problem = f"the host {self.host} has the address {address[0]}, which is not a public one"
                raise RefusedImageError("address", problem)
        family, kind, protocol, _, address = found[0]
        left = self.require_time()
        opened = socket.socket(family, kind, protocol)
        if self._tls:
            context = ssl.create_default_context()
            opened = context.wrap_socket(opened, server_hostname=self.host, do_handshake_on_connect=False)
        self.sock = self._open = opened
        self._timer = threading.Timer(left, self._shut)
        self._timer.daemon = True
        self._timer.start()
        opened.settimeout(left)
        opened.connect(address)
        if isinstance(opened, ssl.SSLSocket):
            opened.do_handshake()

    def require_time(self) -> float:
        """The seconds that are left. Raises TimeoutError where there are none."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.close()
        if self._open is not None:
            self._open.close()

    def _shut(self) -> None:
        # Below TLS, whose own shutdown would wait for the server.
        if self._open is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._open, socket.SHUT_RDWR)


_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv4 addresses in the last 32 bits, see RFC 6052."""


def _is_public(text: str) -> bool:
    """Whether an address is one of the internet, also after its network has translated it."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return _is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        if address not in _UNICAST or address.sixtofour is not None:
            return False
    return address.is_global and not address.is_multicast

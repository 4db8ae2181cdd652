"""Makes the token ids of a prompt, and reads its images, beside the event loop and with a bound on the work."""

import asyncio
import base64
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.errors import InvalidRequestError, PromptTooLongError, RequestTimeoutError
from djl_trtllm.model import Tokenizer
from djl_trtllm.model.vision import MOST_PIXELS, RefusedImageError, Vision, decode
from djl_trtllm.request import GenerationRequest, Image, ImageSource, Token
from djl_trtllm.service.model import Model
from djl_trtllm.service.rendering import ChatRenderer
from djl_trtllm.service.work import WORKERS, WorkerThreads

T = TypeVar("T")

_INLINE_CHARACTERS = 2048
"""Texts up to this length are tokenised on the event loop: it takes under a millisecond, less than using a thread."""
_INLINE_TEXTS = 4
"""The texts that are tokenised on the event loop in one of its turns; the others of the turn are a crowd."""
_CROWDS = WorkerThreads()
"""The threads for crowds. A long text in one of `WORKERS` may take seconds, for which a short one must not wait."""
_REQUEST_CHARACTERS = 64
"""The number of characters whose tokenising takes as long as a request for a vector, beside its own text."""
_INLINE_TOKENS = 256
"""The most ids that are decoded on the event loop."""
_ANY_LENGTH = 1024
"""The longest token, in characters, that is assumed for a vocabulary without one."""
_MARGIN = 65_536
"""Characters that are kept before a truncated prompt: where its first token begins depends on them."""


class ReadPrompt(msgspec.Struct, frozen=True):
    """The ids of a prompt as the engine gets them, its text (None where it came as ids), and its images."""

    ids: Sequence[int]
    text: str | None = None
    images: tuple[Image, ...] = ()


class ShortTexts:
    """Tokenises short texts: the first of each turn of the event loop on it, the others of the turn in a thread.

    These are tokenised by one call. A thread that comes back from a call waits for the GIL, which beside a busy event
    loop takes longer than tokenising a short text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._taken = 0
        """The texts of this turn."""
        self._crowd: list[tuple[str, bool, asyncio.Future[list[int]]]] = []

    async def encode(self, text: str, special: bool) -> list[int]:
        """The ids of a text; `special` adds the model's special tokens. Raises InvalidRequestError."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            loop.call_soon(self._end_turn)
        self._taken += 1
        if self._taken <= _INLINE_TEXTS:
            return self._tokenizer.encode(text, special)
        ids: asyncio.Future[list[int]] = loop.create_future()
        self._crowd.append((text, special, ids))
        return await ids

    def _end_turn(self) -> None:
        self._taken = 0
        crowd, self._crowd = self._crowd, []
        try:
            for special in (False, True):
                if chosen := [(text, ids) for text, added, ids in crowd if added is special]:
                    texts, futures = zip(*chosen, strict=True)
                    work = _CROWDS.submit(self._tokenizer.encode_all, texts, special)
                    asyncio.wrap_future(work).add_done_callback(partial(_share_result, futures))
        except (RuntimeError, MemoryError) as error:  # memory is short, or no thread runs and none can be started
            for _, _, ids in crowd:
                if not ids.done():
                    ids.set_exception(error)


def _share_result(
    futures: Sequence[asyncio.Future[list[int]]], done: asyncio.Future[list[list[int] | Exception]]
) -> None:
    error = done.exception()  # where memory ran out
    _share(futures, done.result() if error is None else [error] * len(futures))


def _share(futures: Iterable[asyncio.Future[list[int]]], results: Iterable[list[int] | BaseException]) -> None:
    for future, result in zip(futures, results, strict=True):
        if future.done():  # its client has left
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


class PromptReader:
    """Reads the prompts of one model's requests. All methods run on the event loop.

    A text that cannot fit is refused by its length in characters, before it is tokenised. Of the others, short ones are
    tokenised on the event loop, those of a crowd and long ones in worker threads by calls that let go of the GIL, and
    conversations are rendered in a process of their own (`ChatRenderer`). The request has been admitted before, so that
    all this waiting counts as waiting in its queue.
    """

    def __init__(self, model: Model, statistics: Statistics) -> None:
        self._tokenizer: Tokenizer = model.tokenizer
        self._short_texts = ShortTexts(model.tokenizer)
        self._max_input_len = model.limits.max_input_len
        self._vision = model.vision
        self._refused = statistics.refused_images
        self._most_bytes = model.options.max_request_size
        self._timeout = model.options.predict_timeout
        self._template_timeout = model.options.chat_template_timeout
        self._renderer: ChatRenderer | None = None

    async def with_ids(self, requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
        """The requests of a call, those of short texts with their ids, for `prompt_of`. Raises RequestTimeoutError.

        Read one after the other, every few of hundreds would wait for a thread. A text without ids is left as it is.
        """
        most = min(_INLINE_CHARACTERS, self._max_input_len)
        texts = [text for each in requests if (text := each.prompt) and each.prompt_ids is None and len(text) <= most]
        if len(texts) <= _INLINE_TEXTS:
            return requests
        encoded = await self.work_of(sum(map(len, texts)), partial(self._tokenizer.encode_all, texts))
        known = {text: ids for text, ids in zip(texts, encoded, strict=True) if isinstance(ids, list)}
        return [replace(each, prompt_ids=known.get(each.prompt or "", each.prompt_ids)) for each in requests]

    async def prompt_of(self, request: GenerationRequest, *, takes_images: bool) -> ReadPrompt:
        """Read a request's prompt; `takes_images`: whether the engine does. Raises InvalidRequestError.

        Images come first, so that a bad image costs no rendering.
        """
        if request.images and request.truncate is not None:
            raise InvalidRequestError("'truncate' is given and the messages have images: leave it out")
        images: tuple[Image, ...] = ()
        if request.images and self._vision is not None:
            images = await self.in_time(read_images(request.images, self._vision, self._most_bytes, self._refused))
        text, ids = request.prompt, request.prompt_ids
        if ids is None:
            if request.messages is not None:
                text = await self.in_time(self.render(request.messages, request.template or {}))
            assert text is not None
            text, ids = await self.read(text, request.truncate, special=request.messages is None)
        if takes_images and self._vision is not None:
            ids = self._vision.expanded(ids, [image.tokens for image in images])
        return ReadPrompt(ids, text, images)

    async def read(self, text: str, truncate: int | None, *, special: bool) -> tuple[str, list[int]]:
        """The prompt and its ids, of which the last `truncate` are used; `special` adds the model's special tokens.

        Raises InvalidRequestError and RequestTimeoutError.
        """
        longest = self._tokenizer.longest_token
        most: int | None = self._max_input_len
        if truncate is None:
            require_short_enough(len(text), longest, self._max_input_len)
        else:
            most = None
            kept = (longest or _ANY_LENGTH) * truncate + _MARGIN
            if len(text) > 2 * kept:
                text = text[-kept:]
        if len(text) <= _INLINE_CHARACTERS:
            return text, await self._short_texts.encode(text, special)
        encode = partial(self._tokenizer.encode, text, special, most)
        return text, await self.in_time(WORKERS.run(encode))

    async def read_pooled(
        self, requests: Sequence[GenerationRequest], fit: Callable[[GenerationRequest, Sequence[int]], Sequence[int]]
    ) -> list[tuple[GenerationRequest, ReadPrompt]]:
        """The requests of a call for vectors or scores with their prompts, which `fit` has checked.

        Raises InvalidRequestError and RequestTimeoutError.
        """
        characters = sum(len(each.prompt or "") + len(each.pair or "") for each in requests)
        tokens = sum(len(each.prompt_ids or ()) for each in requests)
        work = characters + tokens + _REQUEST_CHARACTERS * len(requests)
        return await self.work_of(work, partial(self._read_pooled, requests, fit))

    def _read_pooled(
        self, requests: Sequence[GenerationRequest], fit: Callable[[GenerationRequest, Sequence[int]], Sequence[int]]
    ) -> list[tuple[GenerationRequest, ReadPrompt]]:
        known: dict[str, list[int]] = {}  # a query is the first text of many pairs

        def encoded(text: str, truncate: int | None) -> list[int]:
            if text not in known:
                known[text] = self._tokenizer.encode(
                    self._kept(text, truncate), False, self._max_input_len if truncate is None else None
                )
            return known[text]

        found = []
        for request in requests:
            pooling, most = request.pooling, request.truncate
            assert pooling is not None
            if request.prompt_ids is not None:
                ids = request.prompt_ids[:most]
            else:
                first = encoded(request.prompt or "", most)
                pair = None if request.pair is None else encoded(request.pair, most)
                ids, second = self._tokenizer.surround(first, pair, most)
                request = replace(request, pooling=replace(pooling, second=second))
            # As `submit` keeps them: making an array of a list takes time on the event loop.
            found.append((request, ReadPrompt(array("i", fit(request, ids)), request.prompt)))
        return found

    def _kept(self, text: str, truncate: int | None) -> str:
        """Return the beginning of a text that is tokenised. Raises PromptTooLongError."""
        longest = self._tokenizer.longest_token
        if truncate is None:
            require_short_enough(len(text), longest, self._max_input_len)
            return text
        return text[: (longest or _ANY_LENGTH) * truncate + _MARGIN]

    def render(self, messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]) -> Awaitable[str]:
        """Render a conversation, and return its prompt. Raises InvalidRequestError, and so does awaiting the result."""
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer, self._template_timeout)
        return self._renderer.render(messages, keywords)

    async def text(self, ids: Sequence[int]) -> str:
        """The text of a prompt of ids."""
        return await self._work(len(ids), partial(self._tokenizer.decode, ids))

    async def tokens(self, ids: Sequence[int]) -> list[Token]:
        """The prompt's tokens, each with its text."""
        return await self._work(len(ids), partial(self._tokens, ids))

    def _tokens(self, ids: Sequence[int]) -> list[Token]:
        tokenizer = self._tokenizer
        return [Token(id_, tokenizer.decode([id_], False), None, id_ in tokenizer.special_ids) for id_ in ids]

    async def work_of(self, characters: int, work: Callable[[], T]) -> T:
        """Do work that takes as long as tokenising this number of characters: here, or in a worker thread."""
        return work() if characters <= _INLINE_CHARACTERS else await self.in_time(WORKERS.run(work))

    async def close(self) -> None:
        if self._renderer is not None:
            await self._renderer.close()
            self._renderer = None

    async def _work(self, tokens: int, work: Callable[[], T]) -> T:
        return work() if tokens <= _INLINE_TOKENS else await self.in_time(WORKERS.run(work))

    async def in_time(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises RequestTimeoutError where it takes longer than a request may."""
        try:
            return await asyncio.wait_for(work, self._timeout)
        except asyncio.TimeoutError:
            raise RequestTimeoutError(
                f"the request did not finish within predict_timeout={self._timeout:g} seconds"
            ) from None


def require_short_enough(characters: int, longest_token: int | None, max_input_len: int) -> None:
    """Raise PromptTooLongError, before tokenising, for a text that is too long for any tokens of this vocabulary."""
    if longest_token is not None and characters > longest_token * max_input_len:
        raise PromptTooLongError(
            f"the prompt has {characters} characters, which are at least {-(-characters // longest_token)} tokens, and "
            f"max_input_len is {max_input_len}: shorten it, or raise option.max_input_len"
        )


# -- images ------------------------------------------------------------------------------------------------------------


_DECODING = WorkerThreads(2)
"""Two threads, which bound the memory of decoding."""
_FETCHING = WorkerThreads(8)
_FETCH_SECONDS = 10.0
_PIECE = 65_536
_HEADERS = {"Accept": "image/png, image/jpeg, image/webp, image/gif", "User-Agent": "djl-trtllm"}


async def read_images(
    sources: Sequence[ImageSource], vision: Vision, most_bytes: int, refused: Counter[str]
) -> tuple[Image, ...]:
    """The images of `data:` URLs and of addresses whose hosts the operator allows. A refused one counts in `refused`.

    Work is bounded before it is done: at most `most_bytes`, and at most `MOST_PIXELS` by the images' headers
    (`model/vision.py`), how many are decoded at once, and the time. None of it runs on the event loop, and Pillow
    decodes without the GIL.

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

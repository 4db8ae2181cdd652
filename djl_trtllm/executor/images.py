"""The images of requests, in the form that an engine takes them, and their reading beside its loop.

Decoding a large image takes longer than many iterations.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from djl_trtllm.errors import LayoutError
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.model.checkpoint import read_object
from djl_trtllm.model.vision import ScaledImages, Vision, content_name
from djl_trtllm.request import Image, Sampling

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


class ImagePrompts:
    """Prompts with images of the model in `directory`. A derived class makes the form that its engine takes.

    Raises ValueError for a model whose files do not say how it takes images.
    """

    def __init__(self, directory: Path) -> None:
        vision = Vision.find(directory, read_object(directory / "config.json", LayoutError))
        if vision is None:
            raise ValueError(
                f"{directory} does not say how its model takes images: expected the model's preprocessor_config.json "
                "beside its config.json; fetch the model again, or compile it again"
            )
        self.vision = vision
        self._scaled = ScaledImages(vision)

    def pictures(self, request: Submit) -> "list[Picture]":
        """The images as the model's processor takes them; any one thread may call it. Raises ValueError."""
        return [self._scaled.pixels(image.data, request.cache_salt) for image in request.images]

    def collapsed(self, request: Submit) -> list[int]:
        """The ids of the prompt with one placeholder for each image. Raises ValueError."""
        return self.vision.collapsed(request.prompt_ids, [image.tokens for image in request.images])

    def names(self, request: Submit) -> list[str]:
        """A name for each image, by its content and the prompt's salt."""
        return [content_name(image.data, request.cache_salt) for image in request.images]

    def first(self) -> Submit:
        """A request with a small image, for warming up."""
        ids, file, side = self.vision.example()
        return Submit(0, ids, Sampling(2), images=(Image(file, side, side, self.vision.tokens(side, side)),))


class ImageGate:
    """Holds requests until a thread has read their images, in the order in which they came.

    `read` runs in the thread, for one request at a time, which bounds the memory of decoding; Pillow decodes and scales
    without the GIL. `submit` gets a request with what `read` returned, `fail` one with the exception that it raised.
    Nothing waits but `advance`, which a synchronous engine's loop calls while the gate holds requests.
    """

    def __init__(
        self,
        read: Callable[[Submit], Any],
        submit: Callable[[Submit, Any], None],
        fail: Callable[[Submit, Exception], None],
    ) -> None:
        self._read = read
        self._submit = submit
        self._fail = fail
        self._thread = ThreadPoolExecutor(1, "images")
        self._held: dict[int, tuple[Submit, Future[Any]]] = {}

    def __len__(self) -> int:
        """Return the number of requests that are held."""
        return len(self._held)

    def hold(self, request: Submit) -> None:
        self._held[request.request_id] = request, self._thread.submit(self._read, request)

    def cancel(self, request_id: int) -> Submit | None:
        """Return the request if it is held, and hold it no longer."""
        request, reading = self._held.pop(request_id, (None, None))
        if reading is not None:
            reading.cancel()
        return request

    def advance(self, seconds: float = 0.0) -> None:
        """Let requests through whose images are read, after waiting up to `seconds` for the first of them."""
        wait([reading for _, reading in self._held.values()], seconds, FIRST_COMPLETED)
        for request, reading in list(self._held.values()):
            if not reading.done():
                return
            del self._held[request.request_id]
            error = reading.exception()
            if error is None:
                self._submit(request, reading.result())
            elif isinstance(error, Exception):
                self._fail(request, error)
            else:
                raise error

    def close(self) -> None:
        """Hold nothing longer, and end the thread, when it has read what it reads now."""
        self._held.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)


class AsyncImageGate(ImageGate):
    """A gate that the running event loop advances when the images of a request are read."""

    def hold(self, request: Submit) -> None:
        super().hold(request)
        loop = asyncio.get_running_loop()

        def advance(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # too late: the loop is closed
                loop.call_soon_threadsafe(self.advance)

        self._held[request.request_id][1].add_done_callback(advance)

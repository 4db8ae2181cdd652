"""Images of a model: their tokens in the prompt, the sizes that the model scales them to, and their files.

Pixels are counted from a file's header before any is decoded. Pillow is imported with the first image.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from djl_trtllm.errors import InvalidRequestError, LayoutError
from djl_trtllm.model.checkpoint import read_object

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS = 2**25
"""Most pixels of all images of a request. Decoding one image as large takes 130 to 260 MiB, a WebP 540 (measured)."""
MOST_KEPT = 256 * 2**20
"""Most bytes of the pixels that an engine process keeps."""
_MOST_SCANS = 64
"""Most scans of a JPEG file. Each goes over all pixels; progressive files have ten."""
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
_LONGEST_SIDES = 200
"""The most times that an image's long side may exceed its short side, as in transformers' processor of Qwen-VL."""
_PATCHED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_AROUND = ("vision_start_token_id", "vision_end_token_id")


class RefusedImageError(ValueError):
    """An image is not taken. `reason` is size (bytes, pixels, scans or sides), format, damaged or address."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Vision:
    """The processor of the Qwen-VL models: a token for each square of `side` pixels of the image.

    The image is scaled to whole squares, `least` to `most` pixels in all. `placeholder` is the id that stands for an
    image in a prompt, once where the chat template writes it and then once for each of its tokens. `around` are the
    ids of the marks that the template writes before and after each image, `video` is the placeholder of a video.
    """

    placeholder: int
    side: int
    least: int
    most: int
    around: tuple[int, ...] = ()
    video: int | None = None

    @classmethod
    def find(cls, directory: Path, config: Mapping[str, Any] | None) -> Vision | None:
        """The images that the model of these files takes; None if it takes none, or its files do not say how.

        Raises LayoutError for damaged files.
        """
        if config is None or config.get("model_type") not in _PATCHED or type(config.get("image_token_id")) is not int:
            return None
        processor = read_object(directory / "preprocessor_config.json", LayoutError)
        if processor is None:
            processor = (read_object(directory / "processor_config.json", LayoutError) or {}).get("image_processor")
        if not isinstance(processor, dict):
            return None
        size = processor["size"] if isinstance(processor.get("size"), dict) else {}
        numbers = (
            processor.get("patch_size"),
            processor.get("merge_size"),
            processor.get("min_pixels") or size.get("shortest_edge"),
            processor.get("max_pixels") or size.get("longest_edge"),
        )
        patch, merge, least, most = (number if type(number) is int and number > 0 else 0 for number in numbers)
        if not (patch and merge and least and most):
            return None
        around = tuple(config[name] for name in _AROUND if type(config.get(name)) is int)
        return cls(config["image_token_id"], patch * merge, least, most, around, config.get("video_token_id"))

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """The size that the processor gives an image. Raises RefusedImageError for an image that is too long.

        The rule is that of `smart_resize` in transformers 5.0 (models/qwen2_vl/image_processing_qwen2_vl.py).
        """
        if max(width, height) > _LONGEST_SIDES * min(width, height):
            raise RefusedImageError("size", f"expected at most {_LONGEST_SIDES} times as long as wide")
        side = self.side
        scaled = tuple(round(length / side) * side for length in (width, height))
        pixels = scaled[0] * scaled[1]
        if pixels > self.most:
            factor = math.sqrt(width * height / self.most)
            scaled = tuple(max(side, math.floor(length / factor / side) * side) for length in (width, height))
        elif pixels < self.least:
            factor = math.sqrt(self.least / (width * height))
            scaled = tuple(math.ceil(length * factor / side) * side for length in (width, height))
        long, short = max(scaled), min(scaled)
        # Other sizes are scaled once more by the engine, which then has other tokens.
        if not self.least <= long * short <= self.most or long > _LONGEST_SIDES * short:
            raise RefusedImageError("size", "it is too long for this model's min_pixels and max_pixels")
        return scaled[0], scaled[1]

    def tokens(self, width: int, height: int) -> int:
        """The number of the prompt's tokens that an image takes. Raises RefusedImageError."""
        scaled = self.scaled(width, height)
        return scaled[0] * scaled[1] // self.side**2

    @property
    def most_tokens(self) -> int:
        """The tokens of the largest image; larger ones are scaled to it."""
        return self.most // self.side**2

    def pixels(self, data: bytes) -> Picture:
        """The image of a file as the processor takes it. Raises RefusedImageError."""
        from PIL.Image import Resampling

        picture = decode(data)
        return picture.resize(self.scaled(*picture.size), Resampling.BICUBIC)

    def example(self) -> tuple[list[int], bytes, int]:
        """The ids of a prompt with a small image, the image's file, and the length of its sides in pixels."""
        from PIL import Image as Pictures

        file, side = io.BytesIO(), self.side
        Pictures.new("RGB", (side, side)).save(file, "PNG")
        before, after = self.around[:1], self.around[1:]
        return [*before, *[self.placeholder] * self.tokens(side, side), *after], file.getvalue(), side

    def expanded(self, ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The ids of a prompt with each placeholder repeated for every token of its image.

        Raises InvalidRequestError where the marks of images are not those of a template with these images: OpenVINO
        GenAI finds images by them, and reads beyond its memory where one is missing.
        """
        if (places := ids.count(self.placeholder)) != len(tokens):
            raise InvalidRequestError(
                f"the prompt has {places} places for images, and the request has {len(tokens)}: send images as content "
                f"parts of messages, and {_LEAVE_OUT}"
            )
        if self.video in ids:
            raise InvalidRequestError(f"the prompt has places for videos, and this server takes none: {_LEAVE_OUT}")
        if any(ids.count(mark) != len(tokens) for mark in self.around):
            raise InvalidRequestError(f"the prompt has more marks around images than images: {_LEAVE_OUT}")
        left = iter(tokens)
        return [each for id_ in ids for each in ([id_] * next(left) if id_ == self.placeholder else (id_,))]

    def collapsed(self, ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The ids before `expanded`: one placeholder for each image."""
        left, found, skipped = iter(tokens), list[int](), 0
        for id_ in ids:
            if skipped:
                skipped -= 1
                continue
            found.append(id_)
            if id_ == self.placeholder:
                skipped = next(left, 1) - 1
        return found


class ScaledImages:
    """Images as the processor takes them, kept by the content of their files and the salt of their prompts.

    A conversation sends its images again with each turn. Those of `most_bytes` in all are kept; the one whose last use
    is longest ago goes first.
    """

    def __init__(self, vision: Vision, most_bytes: int = MOST_KEPT) -> None:
        self._vision = vision
        self._left = most_bytes
        self._kept: OrderedDict[str, Picture] = OrderedDict()

    def pixels(self, data: bytes, salt: str) -> Picture:
        """The pixels of an image as `Vision.pixels` returns them, from memory if they are kept."""
        name = content_name(data, salt)
        if (known := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
            return known
        picture = self._vision.pixels(data)
        self._kept[name] = picture
        self._left -= _pixel_bytes(picture)
        while self._left < 0:
            self._left += _pixel_bytes(self._kept.popitem(last=False)[1])
        return picture


def content_name(data: bytes, salt: str) -> str:
    """The name of a file's content among those of prompts with this salt."""
    group = hashlib.sha256(salt.encode())
    return hashlib.sha256(group.digest() + hashlib.sha256(data).digest()).hexdigest()


def _pixel_bytes(picture: Picture) -> int:
    return 3 * picture.width * picture.height


_LEAVE_OUT = "leave the model's own marks of images and videos out of texts"


def decode(data: bytes, most_pixels: int = MOST_PIXELS) -> Picture:
    """The pixels of an image file in RGB, upright, of an animation the first picture.

    Raises RefusedImageError for what is no file of `FORMATS`, has more than `most_pixels`, or is damaged. Lets go of
    the GIL while it decodes.
    """
    from PIL import Image as Pictures, ImageOps, UnidentifiedImageError

    try:
        with Pictures.open(io.BytesIO(data), formats=FORMATS) as opened:
            _check(opened, data, most_pixels)
            opened.load()
            ImageOps.exif_transpose(opened, in_place=True)
            upright: Picture = opened
            return upright if upright.mode == "RGB" else upright.convert("RGB")
    except RefusedImageError:
        raise
    except Pictures.DecompressionBombError:  # more than Pillow's own bound, which is higher
        raise RefusedImageError("size", f"too many pixels, expected at most {most_pixels:,}") from None
    except UnidentifiedImageError:
        raise RefusedImageError("format", f"expected a file of {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's readers raise anything for damaged files
        raise RefusedImageError("damaged", f"a damaged file ({type(error).__name__}: {str(error)[:200]})") from None


def _check(opened: Picture, data: bytes, most_pixels: int) -> None:
    width, height = opened.size
    if width * height > most_pixels:
        raise RefusedImageError(
            "size",
            f"{width} x {height} pixels, expected at most {most_pixels:,}; the images of a request may have "
            f"{MOST_PIXELS:,} in all",
        )
    # Pillow has another format for one with several images.
    if data.startswith(_JPEG) and data.count(_SCAN) > _MOST_SCANS:
        raise RefusedImageError("size", f"a JPEG file of more than {_MOST_SCANS} scans")

"""How a model takes images: their tokens among those of the prompt, the sizes that it scales them to, and their files.

Pixels are counted from a file's header before any is decoded. Pillow is imported with the first image.
"""

from __future__ import annotations

import io
import math
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
"""Of one image: decoding one takes up to 300 MB."""
_MOST_SCANS = 64
"""Of a progressive JPEG file, which has ten: each scan goes over all pixels."""
_SCAN = b"\xff\xda"
_LONGEST_SIDES = 200
"""How many times as long as wide an image may be, as in transformers' processor of Qwen-VL."""
_PATCHED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@dataclass(frozen=True)
class Vision:
    """The processor of the Qwen-VL models: a token for each square of `side` pixels of the image.

    The image is scaled to whole squares, `least` to `most` pixels in all. `placeholder` is the id that stands for an
    image in a prompt, once where the chat template writes it and then once for each of its tokens.
    """

    placeholder: int
    side: int
    least: int
    most: int

    @classmethod
    def find(cls, directory: Path, config: Mapping[str, Any] | None) -> Vision | None:
        """How the model of these files takes images; None if it takes none, or it is not known how.

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
        return cls(config["image_token_id"], patch * merge, least, most)

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """The size that the processor gives an image. Raises ValueError for one that is too long for it.

        The rule is that of `smart_resize` in transformers 5.0 (models/qwen2_vl/image_processing_qwen2_vl.py).
        """
        if max(width, height) > _LONGEST_SIDES * min(width, height):
            raise ValueError(f"expected at most {_LONGEST_SIDES} times as long as wide")
        side = self.side
        scaled = tuple(max(side, round(length / side) * side) for length in (width, height))
        pixels = scaled[0] * scaled[1]
        if pixels > self.most:
            factor = math.sqrt(width * height / self.most)
            scaled = tuple(max(side, math.floor(length / factor / side) * side) for length in (width, height))
        elif pixels < self.least:
            factor = math.sqrt(self.least / (width * height))
            scaled = tuple(math.ceil(length * factor / side) * side for length in (width, height))
        return scaled[0], scaled[1]

    def tokens(self, width: int, height: int) -> int:
        """How many tokens of the prompt an image is. Raises ValueError."""
        scaled = self.scaled(width, height)
        return scaled[0] * scaled[1] // self.side**2

    def pixels(self, data: bytes) -> Picture:
        """The image of a file as the processor takes it. Raises ValueError."""
        picture = decode(data)
        scaled = self.scaled(*picture.size)
        return picture if picture.size == scaled else picture.resize(scaled, _bicubic())


def _bicubic() -> Any:
    from PIL.Image import Resampling

    return Resampling.BICUBIC


def decode(data: bytes) -> Picture:
    """The pixels of an image file in RGB, upright, of an animation the first picture.

    Raises ValueError for what is no file of `FORMATS`, has too many pixels, or is damaged. Lets go of the GIL while it
    decodes.
    """
    from PIL import Image as Pictures
    from PIL import ImageOps, UnidentifiedImageError

    try:
        with Pictures.open(io.BytesIO(data), formats=FORMATS) as opened:
            _check(opened, data)
            opened.load()
            return ImageOps.exif_transpose(opened).convert("RGB")
    except _RefusedError as error:
        raise ValueError(str(error)) from None
    except Pictures.DecompressionBombError:  # more than Pillow's own bound, which is higher
        raise ValueError(f"too many pixels, expected at most {MOST_PIXELS:,}") from None
    except UnidentifiedImageError:
        raise ValueError(f"no file of {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's readers raise anything for damaged files
        raise ValueError(f"a damaged file ({type(error).__name__}: {str(error)[:200]})") from None


class _RefusedError(Exception):
    """A file is too much to decode."""


def _check(opened: Picture, data: bytes) -> None:
    width, height = opened.size
    if width * height > MOST_PIXELS:
        raise _RefusedError(f"{width} x {height} pixels, expected at most {MOST_PIXELS:,} in all")
    if opened.format == "JPEG" and data.count(_SCAN) > _MOST_SCANS:
        raise _RefusedError(f"a JPEG file of more than {_MOST_SCANS} scans")


def expanded(ids: Sequence[int], placeholder: int, tokens: Sequence[int]) -> list[int]:
    """The ids of a prompt with each placeholder as often as its image has tokens.

    Raises InvalidRequestError where there is not one placeholder for each image.
    """
    if (places := list(ids).count(placeholder)) != len(tokens):
        raise InvalidRequestError(
            f"the prompt has {places} places for images, and the request has {len(tokens)}: send images as content "
            "parts of messages, and leave the model's own marks of images out of texts"
        )
    left = iter(tokens)
    return [each for id_ in ids for each in ([id_] * next(left) if id_ == placeholder else (id_,))]


def collapsed(ids: Sequence[int], placeholder: int, tokens: Sequence[int]) -> list[int]:
    """The ids before `expanded`: one placeholder for each image."""
    left, found, skipped = iter(tokens), list[int](), 0
    for id_ in ids:
        if skipped:
            skipped -= 1
            continue
        found.append(id_)
        if id_ == placeholder:
            skipped = next(left, 1) - 1
    return found

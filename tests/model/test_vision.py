"""How images become tokens, and which files are decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pictures

from djl_trtllm.errors import InvalidRequestError, LayoutError
from djl_trtllm.model import vision
from djl_trtllm.model.vision import FORMATS, MOST_PIXELS, ScaledImages, Vision, content_name, decode
from tests.support.tables import by_rows
from tests.support.vision import PROCESSOR, chunk, encoded, picture, png, text_bomb

VISION = Vision(placeholder=7, side=28, least=3136, most=50176)


@by_rows(
    ("width", "height", "scaled"),
    [
        (56, 56, (56, 56)),
        (120, 80, (112, 84)),
        (112, 448, (112, 448)),
        (1, 1, (56, 56)),  # as few pixels as there may be
        (100, 1, (560, 28)),  # what is less than half a square has too few pixels, whatever its length
        (1, 129, (28, 644)),
        (4000, 3000, (252, 168)),  # as many as there may be
        (70, 42, (56, 56)),  # halves are rounded to even numbers, then it has too few pixels
    ],
)
def test_an_image_is_scaled_to_whole_squares_and_has_a_token_for_each(
    width: int, height: int, scaled: tuple[int, int]
) -> None:
    assert VISION.scaled(width, height) == scaled
    assert VISION.tokens(width, height) == scaled[0] * scaled[1] // 784
    assert scaled[0] * scaled[1] <= VISION.most
    assert VISION.scaled(*scaled) == scaled


def test_an_image_may_be_200_times_as_long_as_wide() -> None:
    assert VISION.tokens(400, 2) and VISION.tokens(2, 400)
    for size in ((402, 2), (2, 402)):
        with pytest.raises(ValueError, match="200"):
            VISION.tokens(*size)


@pytest.mark.parametrize(
    ("least", "most", "size"),
    [
        (3136, 50176, (5600, 28)),  # a row of squares is more than there may be
        (3136, 50176, (56, 8000)),
        (50176, 50176, (1000, 900)),  # no whole squares are as much
        (3136, 10**7, (8200, 41)),  # rounding makes it longer
    ],
)
def test_an_image_that_no_whole_squares_fit_is_refused(least: int, most: int, size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="min_pixels and max_pixels"):
        Vision(placeholder=7, side=28, least=least, most=most).scaled(*size)


@pytest.mark.slow
def test_sizes_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    for width in range(1, 1200, 37):
        for height in range(6, min(1200, 200 * width), 41):
            expected = smart_resize(height, width, 28, VISION.least, VISION.most)
            assert VISION.scaled(width, height) == (expected[1], expected[0])


def described(directory: Path, config: dict[str, Any], **files: Any) -> Vision | None:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return Vision.find(directory, config)


CONFIG = {"model_type": "qwen2_vl", "image_token_id": 7}
SIZES = {"shortest_edge": 3136, "longest_edge": 50176}


@pytest.mark.parametrize(
    "files",
    [
        {"preprocessor_config": PROCESSOR},
        {"preprocessor_config": {"patch_size": 14, "merge_size": 2, "size": SIZES}},
        {"processor_config": {"image_processor": PROCESSOR}},
    ],
)
def test_a_model_is_read_from_the_files_of_old_and_new_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    assert described(tmp_path, CONFIG, **files) == VISION


@by_rows(
    ("config", "files"),
    [
        ({**CONFIG, "model_type": "llama"}, {"preprocessor_config": PROCESSOR}),
        ({"model_type": "qwen2_vl"}, {"preprocessor_config": PROCESSOR}),
        (CONFIG, {}),
        (CONFIG, {"processor_config": {}}),
        (CONFIG, {"preprocessor_config": {**PROCESSOR, "patch_size": 0}}),
        (CONFIG, {"preprocessor_config": {**PROCESSOR, "max_pixels": None}}),
    ],
)
def test_a_model_whose_images_cannot_be_counted_takes_none(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any]
) -> None:
    assert described(tmp_path, config, **files) is None


def test_a_damaged_processor_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(LayoutError):
        Vision.find(tmp_path, CONFIG)


# -- files -------------------------------------------------------------------------------------------------------------


@by_rows("form", FORMATS)
def test_files_of_the_formats_are_decoded(form: str) -> None:
    decoded = decode(encoded(picture(30, 20), form))
    assert (decoded.size, decoded.mode) == ((30, 20), "RGB")


def test_of_an_animation_the_first_picture_counts() -> None:
    file = encoded(picture(8, 8), "GIF", save_all=True, append_images=[picture(8, 8, 3)])
    assert decode(file).tobytes() == decode(encoded(picture(8, 8), "GIF")).tobytes()


def test_an_image_is_turned_as_its_camera_says() -> None:
    exif = Pictures.Exif()
    exif[0x0112] = 6
    assert decode(encoded(picture(30, 20), "JPEG", exif=exif)).size == (20, 30)


@by_rows("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_colours_become_rgb(mode: str) -> None:
    form = "JPEG" if mode == "CMYK" else "PNG"
    assert decode(encoded(Pictures.new(mode, (4, 4)), form)).mode == "RGB"


def scans(count: int, form: str = "JPEG", **options: Any) -> bytes:
    """A progressive JPEG file with this number of scans, or a little more."""
    file = encoded(picture(64, 64), form, progressive=True, **options)
    begin = file.index(b"\xff\xda")
    scan = file[begin : file.index(b"\xff\xda", begin + 2)]
    return file[:begin] + scan * count + file[begin:]


@by_rows(
    ("file", "said"),
    [
        (b"", "expected a file of PNG, JPEG, WEBP, GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>", "expected a file of"),
        (encoded(form="BMP"), "expected a file of"),
        (encoded(form="TIFF"), "expected a file of"),
        (encoded()[:-200], "damaged"),
        (encoded(form="JPEG")[:-200], "damaged"),
        (png(4, 4), "damaged"),
        (png(20_000, 20_000, chunk(b"IDAT", b"")), "pixels"),
        (png(5_793, 5_793), "5793 x 5793 pixels"),
        (text_bomb(8_000_000), "damaged"),
        (scans(100), "scans"),
        (scans(100, "MPO", save_all=True, append_images=[picture(64, 64)]), "scans"),
    ],
)
def test_no_other_file_is_decoded(file: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decode(file)


def test_pixels_are_counted_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_PIXELS > 24_000_000  # what a phone's camera makes
    assert decode(encoded(picture(10, 10)), 100).size == (10, 10)
    monkeypatch.setattr(Pictures.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="101 x 1 pixels"):
        decode(png(101, 1), 100)


def test_the_engine_gets_pixels_of_the_scaled_size() -> None:
    assert VISION.pixels(encoded(picture(120, 80))).size == (112, 84)
    whole = picture(112, 84)
    assert VISION.pixels(encoded(whole)).tobytes() == whole.tobytes()


# -- ids ---------------------------------------------------------------------------------------------------------------


def test_a_placeholder_is_repeated_for_each_token_of_its_image() -> None:
    short, long, tokens = [1, 7, 2, 7, 7, 3], [1, 7, 7, 2, 7, 7, 7, 7, 3], [2, 1, 3]
    assert VISION.expanded(short, tokens) == long
    assert VISION.collapsed(long, tokens) == short
    assert VISION.expanded([1, 2], []) == VISION.collapsed([1, 2], []) == [1, 2]
    assert VISION.collapsed([7, 7], []) == [7, 7]


@pytest.mark.parametrize(("ids", "images"), [([1, 7], 0), ([1], 1), ([7, 7], 1)])
def test_each_image_has_its_place(ids: list[int], images: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"has {ids.count(7)} places for images.* has {images}:"):
        VISION.expanded(ids, [2] * images)


@by_rows(
    ("ids", "images"),
    [([9], 0), ([5, 7, 6, 9], 1), ([5], 0), ([6], 0), ([5, 7, 6, 5], 1), ([5, 7, 6, 6], 1), ([7], 1)],
)
def test_marks_of_images_and_videos_are_the_templates_alone(tmp_path: Path, ids: list[int], images: int) -> None:
    marks = {"vision_start_token_id": 5, "vision_end_token_id": 6, "video_token_id": 9}
    marked = described(tmp_path, CONFIG | marks, preprocessor_config=PROCESSOR)
    assert marked is not None
    assert marked.expanded([1, 5, 7, 6, 5, 7, 6], [2, 1]) == [1, 5, 7, 7, 6, 5, 7, 6]
    with pytest.raises(InvalidRequestError, match="leave the model's own marks of images and videos out of texts"):
        marked.expanded(ids, [2] * images)


# -- images that come again --------------------------------------------------------------------------------------------


SMALL = [encoded(picture(56, 56, colour)) for colour in range(3)]


@pytest.mark.parametrize(
    ("uses", "decoded"),
    [
        ([(0, ""), (0, ""), (1, ""), (0, "")], [0, 1]),
        ([(0, ""), (0, "key"), (0, "key"), (0, "")], [0, 0]),
        ([(0, ""), (1, ""), (0, ""), (2, ""), (0, ""), (1, "")], [0, 1, 2, 1]),  # the last use counts
    ],
    ids=["content", "salt", "bound"],
)
def test_an_image_that_comes_again_is_not_decoded_again(
    monkeypatch: pytest.MonkeyPatch, uses: list[tuple[int, str]], decoded: list[int]
) -> None:
    found: list[int] = []

    def counting(data: bytes) -> Pictures.Image:
        found.append(SMALL.index(data))
        return decode(data)

    monkeypatch.setattr(vision, "decode", counting)
    kept = ScaledImages(VISION, most_bytes=2 * 56 * 56 * 3)
    for number, salt in uses:
        assert kept.pixels(SMALL[number], salt).tobytes() == picture(56, 56, number).tobytes()
    assert found == decoded


def test_a_salt_and_a_file_have_no_name_in_common_with_others_of_the_same_bytes() -> None:
    assert content_name(b"GIF89a\0GIF89a", "key") != content_name(b"GIF89a", "key\0GIF89a")
    assert len({content_name(data, salt) for data in SMALL[:2] for salt in ("", "a", "b")}) == 6


def test_an_image_beyond_the_bound_is_not_kept() -> None:
    kept = ScaledImages(VISION, most_bytes=1)
    assert kept.pixels(SMALL[0], "") is not kept.pixels(SMALL[0], "")

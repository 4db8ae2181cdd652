"""Prompts with images on TensorRT-LLM, in real engine processes; TensorRT-LLM is the fake."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image as Picture

from djl_trtllm.executor.protocol import Refusal
from djl_trtllm.model.tokenizer import Tokenizer, load_tokenizer
from djl_trtllm.request import FinishReason, Image
from tests.backends.tensorrt_llm.kit import Machine, in_processes
from tests.executor.kit import Probe
from tests.support.vision import MARK, encoded, picture, seeing_model_on_tensorrt_llm

pytestmark = pytest.mark.slow

VERSIONS = ["1.2.1", "1.3.0", "1.4.0rc1"]
TEXT = "the wolf went into the dark wood to see the old grandmother and the cat"


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    return seeing_model_on_tensorrt_llm(tmp_path / "model")[0]


@pytest.fixture
def machine(seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, seeing, monkeypatch)


@pytest.fixture
def tokenizer(seeing: Path) -> Tokenizer:
    return load_tokenizer(seeing)


@pytest.fixture
def text(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(TEXT, False))


@pytest.fixture
def placeholder(tokenizer: Tokenizer) -> int:
    (found,) = tokenizer.encode(MARK, False)
    return found


def image(colour: int = 0, width: int = 84, height: int = 56) -> Image:
    """A token for each square of 28 pixels, which are no more when it is scaled."""
    return Image(encoded(picture(width, height, colour)), width, height, width * height // 28**2)


@pytest.mark.parametrize("version", VERSIONS)
@in_processes
async def test_prompts_with_and_without_images_run_side_by_side(
    machine: Machine, text: tuple[int, ...], placeholder: int, version: str
) -> Probe:
    probe = await machine.start(version=version, warm_up=True, images=True)
    assert "images" in probe.client.features and "prompt_logprobs" not in probe.client.features
    first, second = image(1), image(2, 56, 56)
    marks = (placeholder,) * 6, (placeholder,) * 4
    probe.submit(1, 400, text)
    probe.submit(2, 400, (*text, *marks[0], *text), images=(first,))
    probe.submit(3, 400, (*marks[0], *marks[1], *text), images=(first, second))
    assert set(await probe.end_of(1, 2, 3)) == {FinishReason.LENGTH}
    given = [call["inputs"] for call in machine.calls("generate_async")][-3:]
    assert [each["prompt"] for each in given] == [TEXT, f"{TEXT}{MARK}{TEXT}", f"{MARK}{MARK}{TEXT}"]
    assert [len(each.get("multi_modal_data", {}).get("image", ())) for each in given] == [0, 1, 2]
    return probe


async def cached(probe: Probe, request_id: int, ids: tuple[int, ...], *images: Image, salt: str = "") -> int:
    """The tokens of a prompt that were in the prefix cache."""
    probe.submit(request_id, 2, ids, images=images, cache_salt=salt)
    assert await probe.end_of(request_id) == [FinishReason.LENGTH]
    return sum(delta.cached_tokens for delta in probe.of(request_id))


@pytest.mark.parametrize("hashes", [True, False], ids=["hashed", "not hashed"])
@pytest.mark.parametrize("version", VERSIONS)
@in_processes
async def test_only_prompts_with_the_same_images_and_the_same_salt_share_the_prefix_cache(
    machine: Machine, text: tuple[int, ...], placeholder: int, version: str, hashes: bool
) -> Probe:
    blocks = {"kv_cache_config": {"class": "KvCacheConfig", "enable_block_reuse": True, "tokens_per_block": 4}}
    probe = await machine.start(
        script={"hashes_images": hashes}, version=version, arguments=blocks, warm_up=True, images=True
    )
    ids = ((placeholder,) * 6) + text * 2
    one = image(1)
    turned = Image(encoded(Picture.frombytes("RGB", (56, 84), picture(84, 56, 1).tobytes())), 56, 84, 6)
    assert await cached(probe, 1, ids, one, salt="a") == 0
    assert await cached(probe, 2, ids, one, salt="a") > 0
    assert await cached(probe, 3, ids, one, salt="b") == 0
    assert await cached(probe, 4, ids, image(2), salt="a") == 0
    assert await cached(probe, 5, ids, turned, salt="a") == 0
    return probe


@in_processes
async def test_a_prompt_that_is_no_texts_is_refused_alone(
    machine: Machine, tokenizer: Tokenizer, text: tuple[int, ...], placeholder: int
) -> Probe:
    probe = await machine.start(images=True)
    spelt = [token_id for letter in TEXT for token_id in tokenizer.encode(letter, False)]
    probe.submit(1, 200, (*(placeholder,) * 6, *text), images=(image(),))
    probe.submit(2, 9, (*(placeholder,) * 6, *spelt), images=(image(),))
    assert await probe.end_of(2, 1) == [FinishReason.ERROR, FinishReason.LENGTH]
    (refused,) = [delta.error for delta in probe.of(2) if delta.error is not None]
    assert isinstance(refused, Refusal) and "tokens are not those of a text" in refused.message
    return probe


@in_processes
async def test_what_the_processor_of_images_raises_ends_one_request(
    machine: Machine, text: tuple[int, ...], placeholder: int
) -> Probe:
    probe = await machine.start(script={"processor_error": "shapes do not fit"}, images=True)
    probe.submit(1, 200, text)
    probe.submit(2, 9, (*(placeholder,) * 6, *text), images=(image(),))
    assert await probe.end_of(2, 1) == [FinishReason.ERROR, FinishReason.LENGTH]
    assert "shapes do not fit" in str([delta.error for delta in probe.of(2)])
    return probe


@in_processes
async def test_an_engine_whose_first_request_with_an_image_fails_takes_texts(
    machine: Machine, text: tuple[int, ...]
) -> Probe:
    probe = await machine.start(script={"processor_error": "no processor"}, warm_up=True, images=True)
    assert "images" not in probe.client.features
    probe.submit(1, 3, text)
    assert await probe.end_of(1) == [FinishReason.LENGTH]
    return probe


@in_processes
async def test_a_large_image_is_read_beside_the_loop(
    machine: Machine, text: tuple[int, ...], placeholder: int
) -> Probe:
    probe = await machine.start(images=True)
    large = image(1, 4200, 4200)
    ids = (*(placeholder,) * 64, *text)
    probe.submit(1, 9, ids, images=(Image(large.data, 4200, 4200, 64),))
    probe.submit(2, 9, ids, images=(Image(large.data, 4200, 4200, 64),))
    probe.submit(3, 9, text)
    probe.client.cancel(2)
    assert await probe.end_of(3) == [FinishReason.LENGTH]
    assert not probe.of(1), "the text did not wait for the image"
    assert await probe.end_of(1, 2) == [FinishReason.LENGTH, FinishReason.CANCELLED]
    assert len(machine.calls("generate_async")) == 2
    return probe

"""Prompts with images on TensorRT-LLM: as it gets them, and in real engine processes; TensorRT-LLM is the fake."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image as Picture

from djl_trtllm.backends.tensorrt_llm.running_request import ImagePrompts
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.executor.protocol import Refusal, Submit
from djl_trtllm.model.tokenizer import Tokenizer, load_tokenizer
from djl_trtllm.request import FinishReason, Image, Sampling
from tests.backends.tensorrt_llm.kit import Machine, in_processes
from tests.executor.kit import Probe
from tests.support.vision import MARK, encoded, picture, seeing_model_on_tensorrt_llm

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


@pytest.mark.slow
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
@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@in_processes
async def test_an_engine_whose_first_request_with_an_image_fails_takes_texts(
    machine: Machine, text: tuple[int, ...]
) -> Probe:
    probe = await machine.start(script={"processor_error": "no processor"}, warm_up=True, images=True)
    assert "images" not in probe.client.features
    probe.submit(1, 3, text)
    assert await probe.end_of(1) == [FinishReason.LENGTH]
    return probe


@pytest.mark.slow
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


# -- a prompt as TensorRT-LLM gets it ----------------------------------------------------------------------------------


def prompts_of(directory: Path, tokenizer: Tokenizer, version: str, hashes: bool | None = True) -> ImagePrompts:
    def decode(ids: list[int], **given: bool) -> str:
        assert given == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return tokenizer.decode(ids, skip_special_tokens=False)

    processor = SimpleNamespace() if hashes is None else SimpleNamespace(multimodal_hashing_supported=hashes)
    llm = SimpleNamespace(tokenizer=SimpleNamespace(decode=decode), input_processor=processor)
    return ImagePrompts(directory, llm, version)


def asked(ids: tuple[int, ...], *images: Image, salt: str = "") -> Submit:
    return Submit(1, list(ids), Sampling(1), images=images, cache_salt=salt)


def test_a_prompt_is_a_text_with_a_mark_for_each_image_and_names_where_the_version_has_them(
    seeing: Path, tokenizer: Tokenizer, text: tuple[int, ...], placeholder: int
) -> None:
    first, second = image(1), image(2, 56, 56)
    for version, named in (("1.2.1", False), ("1.3.0", True), ("1.4.0rc1", True)):
        prompts = prompts_of(seeing, tokenizer, version)
        assert prompts.prompt(asked(text), []) == {"prompt": TEXT}
        request = asked((*text, *(placeholder,) * 6, *(placeholder,) * 4), first, second)
        found = prompts.prompt(request, ["one", "two"])
        assert found.pop("prompt") == f"{TEXT}{MARK}{MARK}"
        assert found.pop("multi_modal_data") == {"image": ["one", "two"]}
        names = found.pop("multi_modal_uuids")["image"] if named else []
        assert len(set(names)) == (2 if named else 0) and found == {}


def test_the_salt_is_that_of_the_images_too_unless_their_names_are_hashed(
    seeing: Path, tokenizer: Tokenizer, text: tuple[int, ...], placeholder: int
) -> None:
    ids = (*text, *(placeholder,) * 6)
    for version, hashes, kept in (
        ("1.3.0", True, True), ("1.3.0", False, False), ("1.3.0", None, False), ("1.2.1", True, False),
    ):  # fmt: skip
        prompts = prompts_of(seeing, tokenizer, version, hashes)
        assert prompts.salt(asked(text, salt="key")) == "key"
        salts = {colour: prompts.salt(asked(ids, image(colour), salt="key")) for colour in (1, 2)}
        assert set(salts.values()) == {"key"} if kept else len({*salts.values(), "key"}) == 3
        if not kept:
            assert prompts.salt(asked(ids, image(1), salt="other")) != salts[1]


def test_tokens_that_are_others_than_the_server_has_counted_are_refused(
    seeing: Path, tokenizer: Tokenizer, text: tuple[int, ...], placeholder: int
) -> None:
    prompts, ids = prompts_of(seeing, tokenizer, "1.3.0"), [*text, *(placeholder,) * 6]
    request = asked(tuple(ids), image(1))
    prompts.check(request, ids)
    prompts.check(request, [*text, *(10**6,) * 6])  # an id beyond the vocabulary for each token of an image
    for wrong in ([*ids, 1], ids[:-1], [ids[0] + 1, *ids[1:]]):
        with pytest.raises(InvalidRequestError, match="send messages or a text"):
            prompts.check(request, wrong)

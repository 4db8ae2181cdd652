"""Images, models that take them, and what transformers generates from prompts with them."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from PIL import Image

from tests.fakes.installation import fake_tensorrt_llm
from tests.support.models import TINY_STORIES, scripted_model

MARK = "<|image|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}" + MARK + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
PROCESSOR = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 50176}
"""A token for each square of 28 pixels, 4 to 64 of them."""


# -- files -------------------------------------------------------------------------------------------------------------


def picture(width: int = 56, height: int = 56, colour: int = 0) -> Image.Image:
    """A picture of stripes whose colours follow from `colour`."""
    row = bytes((colour * 37 + x * 11 + channel * 71) % 256 for x in range(width) for channel in range(3))
    rows = b"".join(row[3 * y % len(row) :] + row[: 3 * y % len(row)] for y in range(height))
    return Image.frombytes("RGB", (width, height), rows)


def encoded(image: Image.Image | None = None, form: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    buffer = io.BytesIO()
    (picture() if image is None else image).save(buffer, form, **options)
    return buffer.getvalue()


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG file with this header, whatever its chunks have."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"".join((b"\x89PNG\r\n\x1a\n", header, *chunks, chunk(b"IEND", b"")))


def text_bomb(size: int) -> bytes:
    """A small image as a PNG file with a compressed comment of this number of bytes."""
    comment = chunk(b"iTXt", b"k\0\1\0\0\0" + zlib.compress(bytes(size), 9))
    return png(28, 28, comment, chunk(b"IDAT", zlib.compress(bytes(28 * 85))))


def image_part(url: str) -> dict[str, Any]:
    """OpenAI's content part."""
    return {"type": "image_url", "image_url": {"url": url}}


# -- a model whose engine is scripted ----------------------------------------------------------------------------------


def seeing_model(directory: Path, script: dict[str, Any] | None = None, /, **options: object) -> Path:
    """The scripted model as one that takes images; its engine does nothing with them."""
    model = scripted_model(directory, {"features": ["images"], **(script or {})}, **options)
    vocabulary = len(json.loads((TINY_STORIES / "tokenizer.json").read_text())["model"]["vocab"])
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = TEMPLATE
    tokenizer["additional_special_tokens"] += [MARK]
    tokenizer["added_tokens_decoder"] = {str(vocabulary): {"content": MARK, "special": True}}
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "qwen2_vl", "image_token_id": vocabulary, "vocab_size": vocabulary + 1}
    for name, content in (("tokenizer_config", tokenizer), ("config", config), ("preprocessor_config", PROCESSOR)):
        (model / f"{name}.json").unlink(missing_ok=True)
        (model / f"{name}.json").write_text(json.dumps(content))
    return model


def seeing_model_on_tensorrt_llm(
    directory: Path, script: dict[str, Any] | None = None, /, *, version: str = "1.4.0rc1", **options: object
) -> tuple[Path, dict[str, str]]:
    """The same in front of the fake TensorRT-LLM, and the environment that has the fake.

    As with Qwen-VL, the mark of images is in tokenizer.json, and texts get no tokens of the model's own.
    """
    model = seeing_model(directory, **{"option.backend": "pytorch", **options})
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    mark = {"id": config["image_token_id"], "content": MARK, "special": True, "normalized": False}
    tokenizer["added_tokens"] += [{**mark, "single_word": False, "lstrip": False, "rstrip": False}]
    tokenizer["post_processor"] = None
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    lines = (model / "serving.properties").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("option.script")]
    (model / "serving.properties").write_text("".join(kept))
    return model, fake_tensorrt_llm(directory.parent / f"{directory.name}-fake", version=version, script=script)


# -- a model with random weights ---------------------------------------------------------------------------------------

_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_QWEN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_vision_checkpoint(path: Path) -> Path:
    """A random Qwen2-VL as transformers saves it, of 150,000 parameters, with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    torch.set_num_threads(1)
    torch.manual_seed(0)
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(["what is in this picture, and what in that one?"] * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(_SPECIAL[3:]),
    )
    tokenizer.chat_template = _QWEN
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in _SPECIAL}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    text = {
        **sizes,
        "num_key_value_heads": 1,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2048,
        "rope_parameters": rope,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim > 1:
                values.normal_(0, 0.2)
    model.save_pretrained(path)
    bounds = {"min_pixels": PROCESSOR["min_pixels"], "max_pixels": PROCESSOR["max_pixels"]}
    Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**bounds),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=_QWEN,
    ).save_pretrained(path)
    return path


class VisionReference:
    """The checkpoint in transformers, in float32."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoProcessor, Qwen2VLForConditionalGeneration
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(1)
        self._model = Qwen2VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._processor = AutoProcessor.from_pretrained(checkpoint, use_fast=False)

    def greedy(self, messages: list[dict[str, Any]], images: list[Image.Image], new_tokens: int) -> list[int]:
        """The new tokens. `messages` have `{"type": "image"}` for each of the images."""
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        given = self._processor(text=[text], images=images or None, return_tensors="pt")
        settings = {"do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        output = self._model.generate(**given, **settings)
        ids: list[int] = output[0, given["input_ids"].shape[1] :].tolist()
        return ids

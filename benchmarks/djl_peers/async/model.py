"""DJL's own way in async mode: its helpers for streams; the tokens are scripted."""

import asyncio
import itertools
import json

from djl_python.async_utils import handle_streaming_response
from djl_python.encode_decode import decode

_TOKENS = ("the", " little", " red", " riding", " hood", " went", " into", " the", " dark", " wood")
_period = 0.0


async def _generate(count):
    loop = asyncio.get_running_loop()
    due = loop.time()
    tokens = itertools.cycle(_TOKENS)
    for number in range(count):
        due += _period
        await asyncio.sleep(max(0.0, due - loop.time()))
        yield {"token": {"id": number, "text": next(tokens), "log_prob": -0.5}, "last": number == count - 1}


def _format(chunk):
    last = chunk.pop("last")
    if last:
        chunk["generated_text"] = ""
    return json.dumps(chunk), last


async def handle(inputs):
    global _period
    properties = inputs.get_properties()
    if inputs.is_empty():
        steps = float(properties.get("steps_per_second", 0))
        _period = 1 / steps if steps else 0.0
        return None
    payload = decode(inputs, inputs.get_property("Content-Type"))
    return handle_streaming_response(_generate(payload["parameters"]["max_new_tokens"]), _format)

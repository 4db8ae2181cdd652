"""What djl_python itself makes of bodies: `python -m tools.djl_bodies FOLDER_033 FOLDER_036`, `engines/python/setup` of
two checkouts of deepjavalibrary/djl-serving (branches 0.33.0-dlc and 0.36.0-lmi27-dlc).

Its handlers run with stand-ins for the engines, which record the request that they get. Writes
`tests/api/golden/djl_bodies.json`: for each body the API that each handler takes it for, and for events of an engine
the lines that each handler sends.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

OUTPUT = Path(__file__).parents[1] / "tests" / "api" / "golden" / "djl_bodies.json"
HANDLERS = {"0.33": "lmi_trtllm.trtllm_async_service", "0.36": "lmi_vllm.vllm_async_service"}
_CHAT = [{"role": "user", "content": "a wolf"}]
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "a wolf"},
    {"prompt": ["a wolf", "a fox"], "max_tokens": 3},
    {"prompt": [5, 6], "stream": True},
    {"messages": _CHAT},
    {"messages": _CHAT, "stream": True, "max_tokens": 3},
    {"inputs": "a wolf"},
    {"inputs": "a wolf", "parameters": {"max_new_tokens": 3, "details": True}, "stream": True},
    {"parameters": {"max_new_tokens": 3}},
    {},
)
EVENTS = (
    'data: {"object":"text_completion","choices":[{"index":0,"text":" said"}]}\n\n',
    'data: {"object":"text_completion","choices":[{"index":0,"text":"\\n","finish_reason":"stop"}]}\n\n',
    'data: {"object":"text_completion","choices":[],"usage":{"prompt_tokens":3}}\n\n',
    "data: [DONE]\n\n",
)


_ABSENT = ("vllm", "tensorrt_llm", "openai", "torch", "transformers", "PIL", "boto3", "requests", "peft", "lmcache")


class _Recorded:
    """A request of an engine's API."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class _Completion(_Recorded): ...


class _Chat(_Recorded): ...


class _Module(ModuleType):
    """A stand-in for a module that is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return {"CompletionRequest": _Completion, "ChatCompletionRequest": _Chat}.get(name) or MagicMock()


class _Finder(MetaPathFinder, Loader):
    """Finds the engines, and what djl_python imports that the tests' environment does not have."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _handled(handler: Any, body: dict[str, Any]) -> tuple[Any, Any]:
    """The request that the engine gets for a body, and what formats its stream. Raises what the handler raises."""
    inputs = importlib.import_module("djl_python.inputs").Input()
    inputs.properties["Content-Type"] = "application/json"
    inputs.content.add(key="data", value=json.dumps(body).encode())
    if hasattr(handler, "preprocess_requests"):
        found = handler.preprocess_requests(inputs)
        return found.request, found
    found = handler.preprocess_request(inputs)
    return found.vllm_request, found


def _api(handler: Any, body: dict[str, Any]) -> str:
    try:
        request, found = _handled(handler, dict(body))
    except Exception as error:
        return f"refused: {error}"
    return "lmi" if found.accumulate_chunks else "chat" if isinstance(request, _Chat) else "completions"


def _stream(handler: Any) -> dict[str, Any]:
    """Content type and lines of the answer to a streamed prompt."""
    utils, outputs = (importlib.import_module(f"djl_python.{name}") for name in ("async_utils", "outputs"))
    _, found = _handled(handler, {"prompt": "a wolf", "stream": True})
    sent: list[dict[str, Any]] = []

    def encode(item: dict[str, Any]) -> bytes:
        sent.append(item)
        return b""

    outputs.Output.binary_encode = encode

    async def events() -> AsyncIterator[str]:
        for event in EVENTS:
            yield event

    async def types() -> list[str]:
        lines = utils.handle_streaming_response(events(), found.stream_output_formatter)
        return [output.get_property("Content-Type") async for output in lines]

    (content_type,) = set(asyncio.run(types()))
    return {"content_type": content_type, "body": "".join(item["data"] for item in sent), "last": sent[-1]["last"]}


def answers(version: str, folder: str) -> dict[str, Any]:
    """What the handler of a version makes of each body, and of the events."""
    logging.disable()
    sys.path.insert(0, folder)
    sys.meta_path.insert(0, _Finder())
    module = importlib.import_module(f"djl_python.{HANDLERS[version]}")
    handler = module.service if version == "0.36" else module.TensorRTLlmAsyncService()
    handler.session_manager, handler.model_name = None, "lmi"
    handler.completion_service = handler.chat_completion_service = MagicMock()
    return {"apis": [_api(handler, body) for body in BODIES], "stream": _stream(handler)}


def main(*folders: str) -> None:
    found = {}
    for version, folder in zip(HANDLERS, folders, strict=True):
        # Each version is a package of the same name.
        call = f"import json, tools.djl_bodies as each; print(json.dumps(each.answers({version!r}, {folder!r})))"
        done = subprocess.run([sys.executable, "-c", call], stdout=subprocess.PIPE, check=True)
        found[version] = json.loads(done.stdout)
    OUTPUT.write_text(json.dumps({"bodies": BODIES, "events": EVENTS, "answers": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Formatters of a model directory: `@input_formatter` and `@output_formatter` functions in its `model.py`.

DJL has two signatures of each, and both are called as documented by DJL:

- `input(payload: dict, tokenizer=None, **kwargs) -> dict` changes the decoded payload before it is parsed;
  `input(input_item: Input, **kwargs) -> RequestInput` reads the request by itself.
- `output(response: dict) -> dict` changes every JSON object of the response: the whole one, or each line of a stream;
  `output(request_output: TextGenerationOutput) -> str` is called per token and writes the response by itself.

The annotation of the first argument, or without one its name (`input_item`, `request_output`), selects the signature.
The functions run on the server's event loop. An exception fails only its own request; the log has the traceback.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import msgspec

from djl_trtllm.api.base import Call, RawRequest, ResponseEncoder
from djl_trtllm.api.custom import djl_python_shim
from djl_trtllm.api.custom.encoders import ObjectEncoder, TokenEncoder
from djl_trtllm.api.lmi import parse as lmi
from djl_trtllm.api.parameters import show
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError, ModelError, RequestError

_logger = logging.getLogger(__name__)

FILE_NAME = "model.py"

_Function = Callable[..., Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_NOT_CALLED = ("handle", "model_fn", "input_fn", "predict_fn", "output_fn")


@dataclass(frozen=True, slots=True)
class CustomFormatters:
    """The formatters of a `model.py`. `parse` replaces LMI's parser for the model.

    The input formatter gets the `attributes` that it accepts as keyword arguments. `indexed_tokens`: the output
    formatter unpacks four values from `get_next_token`, as since DJL 0.32, and not three.
    """

    input_formatter: _Function | None = None
    output_formatter: _Function | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    indexed_tokens: bool = True

    def parse(self, request: RawRequest, options: Options) -> Call:
        """Read a request and wrap its encoder. Raises what `lmi.parse` raises."""
        body, properties = request.body, request.properties
        content_type = request.content_type
        request_input = None
        if self.input_formatter is None:
            payload = lmi.decode(body, content_type)
        elif _takes(self.input_formatter, ("Input",), ("input_item", "inputs", "input")):
            request_input = self._call_input(_input_object(body, content_type, properties))
            if isinstance(request_input, dict):
                request_input, payload = None, request_input
            else:
                payload = _payload(request_input)
        else:
            payload = self._call_input(lmi.decode(body, content_type))
        call = lmi.parse_payload(payload, options, properties)
        (generation,) = call.requests
        formatter = self.output_formatter or getattr(request_input, "output_formatter", None)
        if not callable(formatter):
            return call
        if _takes(formatter, ("TextGenerationOutput", "RequestOutput"), ("request_output",)):
            request_input = request_input or _text_input(payload)
            request_input.tgi_compat = options.tgi_compat
            encoder: ResponseEncoder = TokenEncoder(
                formatter,
                request_input,
                stream=call.encoder.stream,
                n=generation.sampling.n,
                indexed_tokens=self.indexed_tokens,
            )
            return call._replace(requests=(msgspec.structs.replace(generation, logprobs=True),), encoder=encoder)
        return call._replace(encoder=ObjectEncoder(formatter, call.encoder))

    def _call_input(self, argument: Any) -> Any:
        function = self.input_formatter
        assert function is not None
        try:
            return function(argument, **_accepted(function, self.attributes))
        except RequestError:
            raise
        except (Exception, SystemExit) as error:
            _logger.exception("The input formatter of %s failed", FILE_NAME)
            raise InvalidRequestError(
                f"{lmi.PREFIX}The model's input formatter raised {type(error).__name__}: {error}"
            ) from error


def load_custom(model_dir: Path, attributes: Mapping[str, Any] = _NOTHING) -> CustomFormatters | None:
    """Run the `model.py` of a model directory. Returns None if there is none, or no formatter in it.

    `attributes` are the keyword arguments that input formatters may accept, such as `tokenizer`. Raises ModelError if
    the file fails.
    """
    path = model_dir / FILE_NAME
    if not path.is_file():
        return None
    djl_python_shim.install()
    module = _run(path)
    marked = {name: function for name, function in vars(module).items() if callable(function)}
    input_formatter = _marked(marked, "is_input_formatter")
    output_formatter = _marked(marked, "is_output_formatter")
    not_called = [name for name in _NOT_CALLED if name in marked]
    not_called += [
        name
        for name, function in marked.items()
        if getattr(function, "is_prediction_handler", False) or getattr(function, "is_init_handler", False)
    ]
    if not_called:
        _logger.warning(
            "%s: %s not called: this server runs the model itself and uses only the formatters of %s",
            path,
            ", ".join(not_called) + (" are" if len(not_called) > 1 else " is"),
            FILE_NAME,
        )
    if input_formatter is None and output_formatter is None:
        return None
    return CustomFormatters(input_formatter, output_formatter, attributes, _unpacks_four(path))


def _run(path: Path) -> ModuleType:
    # model.py imports files beside it by their plain names, at once or in a formatter.
    directory = str(path.parent.resolve())
    if directory not in sys.path:
        sys.path.append(directory)
    name = f"djl_trtllm_model_{hashlib.sha256(directory.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ModelError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}. Only its formatters are used: correct it, or "
            "remove it to serve the model without them."
        ) from error
    return module


def _marked(functions: Mapping[str, _Function], mark: str) -> _Function | None:
    found = [function for function in functions.values() if getattr(function, mark, False) is True]
    return found[0] if found else None


def _unpacks_four(path: Path) -> bool:
    """Whether the file unpacks four values from `get_next_token()`: nothing else distinguishes DJL's two forms."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr == "get_next_token"
            and isinstance(node.targets[0], ast.Tuple)
        ):
            return len(node.targets[0].elts) != 3
    return True


def _takes(function: _Function, types: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Whether the first argument is annotated with one of `types`, or has no annotation and one of `names`."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    if first is None:
        return False
    if first.annotation is inspect.Parameter.empty:
        return first.name in names
    annotation = first.annotation
    # Annotations are strings in modules with postponed evaluation.
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name.rpartition(".")[2] in types


def _accepted(function: _Function, attributes: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(attributes)
    return {name: value for name, value in attributes.items() if name in list(parameters)[1:]}


def _input_object(body: bytes, content_type: str | None, properties: Mapping[str, str]) -> Any:
    from djl_python.inputs import Input  # type: ignore[import-not-found]  # DJL's own, or the shim

    found = Input()
    found.properties = dict(properties)
    if content_type:
        found.properties["Content-Type"] = content_type
        found.properties.pop("content-type", None)
    content = found.content
    if isinstance(content, dict):
        content["data"] = body
    else:
        content.add("data", body)
    return found


def _payload(request_input: Any) -> dict[str, Any]:
    """The LMI payload that is equivalent to a `RequestInput`."""
    text = getattr(request_input, "input_text", None)
    parameters = getattr(request_input, "parameters", None)
    if not hasattr(request_input, "input_text") or not isinstance(parameters, dict):
        raise InvalidRequestError(
            f"{lmi.PREFIX}The model's input formatter returned {show(repr(request_input))}: "
            "expected a dict or a TextInput with 'input_text' and 'parameters'"
        )
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    parameters = dict(parameters)
    payload = {"inputs": text, "stream": parameters.pop("stream", False), "parameters": parameters}
    if isinstance(request_input.output_formatter, str):
        parameters.setdefault("output_formatter", request_input.output_formatter)
    return payload


def _text_input(payload: dict[str, Any]) -> Any:
    from djl_python.request_io import TextInput  # type: ignore[import-not-found]  # as above

    text = payload.get("inputs", payload.get("prompt"))
    return TextInput(input_text=text, parameters=dict(payload.get("parameters") or {}))

"""The formatters of a model directory: `@input_formatter` and `@output_formatter` functions in its `model.py`."""

import ast
import hashlib
import importlib.util
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import orjson
from msgspec.structs import replace

from djl_trtllm.api.base import Call, ModelContext, Prompt, RawRequest, ResponseEncoder
from djl_trtllm.api.dialects.lmi import dialect as lmi, djl_python_shim
from djl_trtllm.api.parameters import show
from djl_trtllm.errors import GenerationError, InvalidRequestError, ModelError, RequestError
from djl_trtllm.request import FINISH_WORDS, FinishReason, OutputChunk, SequenceResult, Token

_logger = logging.getLogger(__name__)

_request_ids = itertools.count()
_EVENT = b"data: "


class FormattedEncoder(ResponseEncoder):
    """Passes every JSON object of another encoder through a formatter of dictionaries."""

    def __init__(self, formatter: Callable[[Any], Any], inner: ResponseEncoder) -> None:
        self._formatter = formatter
        self._inner = inner
        self.stream = inner.stream
        self.content_type = inner.content_type
        self.wants_prompt_tokens = inner.wants_prompt_tokens

    def begin(self, prompt: Prompt) -> None:
        self._inner.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        """See `ResponseEncoder`. Raises GenerationError if the formatter raises."""
        if chunk.finished is not None and chunk.finished.error is not None:
            tokens = self._inner.encode(replace(chunk, finished=None))
            return self._format(tokens) + self._inner.error(chunk.finished.error)
        return self._format(self._inner.encode(chunk))

    def error(self, error: RequestError) -> bytes:
        """The inner encoder's error, which no formatter changes: the formatter may have failed."""
        return self._inner.error(error)

    def _format(self, encoded: bytes) -> bytes:
        if self.content_type == "text/plain":
            return encoded
        # JSON has no raw newlines, so a line is an object, or blank at the end of an event.
        lines = encoded.split(b"\n")
        return b"\n".join([self._format_line(line) for line in lines])

    def _format_line(self, line: bytes) -> bytes:
        prefix = _EVENT if line.startswith(_EVENT) else b""
        content = line[len(prefix) :]
        if not content.startswith((b"{", b"[{")):
            return line  # blank or `[DONE]`
        decoded = orjson.loads(content)
        if isinstance(decoded, list):
            return prefix + orjson.dumps([self._call(item) for item in decoded])
        formatted = self._call(decoded)
        return prefix + (formatted.encode() if isinstance(formatted, str) else orjson.dumps(formatted))

    def _call(self, shown: dict[str, Any]) -> Any:
        formatted = _guarded(self._formatter, shown)
        if not isinstance(formatted, (dict, str)):
            raise GenerationError(
                f"The model's output formatter returned {type(formatted).__name__}: expected a dict or a str"
            )
        return formatted


class TokenEncoder(ResponseEncoder):
    """Calls a formatter of `TextGenerationOutput` once per token; the response consists of its results.

    Without `stream`, the results are sent together at the end.
    """

    wants_prompt_tokens = True

    def __init__(
        self, formatter: Callable[[Any], Any], request_input: Any, *, stream: bool, n: int, indexed_tokens: bool
    ) -> None:
        from djl_python import request_io  # type: ignore[import-not-found]  # DJL's own, or the shim

        self.stream = stream
        self.content_type = "application/jsonlines" if stream else "application/json"
        self._formatter = formatter
        self._make_token = request_io.Token
        # DJL's own package has one form of sequence; the shim has the form that the formatter was written for.
        if request_io.Sequence is djl_python_shim.Sequence and not indexed_tokens:
            make_sequence: Any = djl_python_shim.ThreeValueSequence
        else:
            make_sequence = request_io.Sequence
        request_input.request_id = next(_request_ids)
        self._output = request_io.TextGenerationOutput(request_id=request_input.request_id, input=request_input)
        self._output.sequences.update({index: make_sequence() for index in range(n)})
        self._output.other_sequences_indices = list(range(1, n))
        self._running = n
        self._last_id = -1
        self._pending: list[str] = []
        self._broken = False

    def begin(self, prompt: Prompt) -> None:
        self._output.input.input_text = prompt.text
        self._output.prompt_tokens_details = [
            self._make_token(token.id, token.text, token.logprob, token.special) for token in prompt.tokens
        ]

    def encode(self, chunk: OutputChunk) -> bytes:
        """See `ResponseEncoder`. Raises GenerationError if the formatter raises."""
        index, tokens, finished = chunk.index, chunk.tokens, chunk.finished
        if finished is not None and finished.error is not None:
            return self.encode(OutputChunk(index, tokens, None)) + self.error(finished.error)
        if finished is not None and not tokens:
            # The formatter receives the end together with a token, so there has to be one.
            tokens = [Token(self._last_id, "", 0.0, True)]
        for position, token in enumerate(tokens, 1):
            self._step(index, token, finished if position == len(tokens) else None)
        if not self.stream and self._running:
            return b""
        text, self._pending = "".join(self._pending), []
        return text.encode(errors="replace")

    def error(self, error: RequestError) -> bytes:
        """The formatter's output for a last token that is an error; a line of JSON if the formatter fails."""
        if not self._broken and self.stream:
            token = self._make_token(-1, "", -1.0, True, str(error))
            self._output.finished = True
            self._output.set_next_token(token, 0, is_last_token=True, finish_reason=FINISH_WORDS[FinishReason.ERROR])
            try:
                return str(self._formatter(self._output)).encode(errors="replace")
            except (Exception, SystemExit):
                _logger.exception("The model's output formatter failed on an error")
        return orjson.dumps({"error": str(error), "code": 424}, option=orjson.OPT_APPEND_NEWLINE)

    def _step(self, index: int, token: Token, finished: SequenceResult | None) -> None:
        self._last_id = token.id
        if finished is not None:
            self._running -= 1
            self._output.finished = self._running == 0
            if finished.cumulative_logprob is not None:
                self._output.sequences[index].cumulative_log_prob = finished.cumulative_logprob
        self._output.set_next_token(
            self._make_token(token.id, token.text, token.logprob, token.special or None),
            index,
            is_last_token=finished is not None,
            finish_reason=None if finished is None else FINISH_WORDS[finished.reason],
        )
        self._broken = True
        formatted = _guarded(self._formatter, self._output)
        if not isinstance(formatted, str):
            raise GenerationError(f"The model's output formatter returned {type(formatted).__name__}: expected a str")
        self._broken = False
        self._pending.append(formatted)


def _guarded(formatter: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return formatter(argument)
    except (Exception, SystemExit) as error:
        _logger.exception("The model's output formatter failed")
        raise GenerationError(f"The model's output formatter raised {type(error).__name__}: {error}") from error


FILE_NAME = "model.py"

_Function = Callable[..., Any]
Reader = Callable[[Any, RawRequest, ModelContext], Call]
"""Reads a payload that an input formatter may have changed: `Lmi.read`."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_NOT_CALLED = ("handle", "model_fn", "input_fn", "predict_fn", "output_fn")


@dataclass(frozen=True, slots=True)
class CustomFormatters:
    """The formatters of a `model.py`. `parse` replaces LMI's parser for the model.

    DJL has two signatures of each, and both are called as documented by DJL:

    - `input(payload: dict, tokenizer=None, **kwargs) -> dict` changes the decoded payload before it is parsed;
      `input(input_item: Input, **kwargs) -> RequestInput` reads the request by itself.
    - `output(response: dict) -> dict` changes every JSON object of the response: the whole one, or each line of a
      stream; `output(request_output: TextGenerationOutput) -> str` is called per token and writes the response by
      itself.

    The annotation of the first argument, or without one its name (`input_item`, `request_output`), selects the
    signature. The functions run on the server's event loop. An exception fails only its own request; the log has the
    traceback.

    The input formatter gets the `attributes` that it accepts as keyword arguments. `indexed_tokens`: the output
    formatter unpacks four values from `get_next_token`, as since DJL 0.32, and not three.
    """

    read: Reader
    input_formatter: _Function | None = None
    output_formatter: _Function | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    indexed_tokens: bool = True

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        """Read a request and wrap its encoder. Raises what `Lmi.read` raises."""
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
        call = self.read(payload, request, model)
        formatter = self.output_formatter or getattr(request_input, "output_formatter", None)
        if not callable(formatter):
            return call
        if _takes(formatter, ("TextGenerationOutput", "RequestOutput"), ("request_output",)):
            if len(call.requests) > 1:
                raise InvalidRequestError(
                    f"'prompt' has {len(call.requests)} prompts, and the model's output formatter takes one: send a "
                    "request for each"
                )
            (generation,) = call.requests
            request_input = request_input or _text_input(payload)
            request_input.tgi_compat = model.options.tgi_compat
            encoder: ResponseEncoder = TokenEncoder(
                formatter,
                request_input,
                stream=call.encoder.stream,
                n=generation.sampling.n,
                indexed_tokens=self.indexed_tokens,
            )
            return replace(call, requests=(replace(generation, logprobs=True),), encoder=encoder)
        return replace(call, encoder=FormattedEncoder(formatter, call.encoder))

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


def load_custom(model_dir: Path, read: Reader, attributes: Mapping[str, Any] = _NOTHING) -> CustomFormatters | None:
    """Run the `model.py` of a model directory. Returns None if there is none, or no formatter in it.

    `read` reads what input formatters return, `attributes` are the keyword arguments that they may accept, such as
    `tokenizer`. Raises ModelError if the file fails.
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
    return CustomFormatters(read, input_formatter, output_formatter, attributes, _unpacks_four(path))


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
    if isinstance(formatter := getattr(request_input, "output_formatter", None), str):
        parameters.setdefault("output_formatter", formatter)
    return payload


def _text_input(payload: dict[str, Any]) -> Any:
    from djl_python.request_io import TextInput  # type: ignore[import-not-found]  # as above

    text = payload.get("inputs", payload.get("prompt"))
    return TextInput(input_text=text, parameters=dict(payload.get("parameters") or {}))

"""Render a model's chat template: messages in, prompt text out.

A template is a program that comes with the model, and messages are its input. So the server renders in a process of its
own (`prepare`, `render`), where a template that loops or takes all memory ends nothing else.
"""

import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from djl_trtllm.errors import InvalidRequestError, TokenizerError
from djl_trtllm.files import MOST_JSON_BYTES
from djl_trtllm.model.checkpoint import content_of, read_object

DEFAULT = "default"
TOOL_USE = "tool_use"

_NO_TEMPLATE = (
    "this model has no chat template, so it cannot take a list of messages; send the prompt as one text, "
    "or add a chat_template.jinja (or `chat_template` in tokenizer_config.json) to the model directory"
)


class ChatTemplate:
    """The named templates of a model; most models have one, named `default`.

    They render as with transformers (`apply_chat_template`): the same sandbox, block trimming, loop controls, `{%
    generation %}` tag and helper functions. transformers is not imported: that takes seconds, and imports torch if
    torch is installed. The templates are compiled at their first use, or by `compile`, which takes seconds for
    templates of megabytes.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any], origin: Path) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._origin = origin

    def compile(self) -> None:
        """Raise `TokenizerError` if a template is not valid Jinja."""
        _ = self._templates

    @cached_property
    def _templates(self) -> dict[str, jinja2.Template]:
        environment = _environment()
        templates = {}
        for name, source in self._sources.items():
            try:
                templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise TokenizerError(
                    f"the chat template {name!r} of {self._origin} is not valid Jinja: line {error.lineno}: "
                    f"{error.message}; correct it, or remove it to serve the model without chat"
                ) from error
        return templates

    def render(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> str:
        """The prompt text of a conversation.

        `add_generation_prompt` defaults to True. `tools`, `documents` and all other keywords are passed to the template
        unchanged. `chat_template` names one of the model's templates; the default is `tool_use` if there are tools and
        such a template, else `default`. The arguments of earlier tool calls, JSON as text in OpenAI's format, become
        objects where the template takes objects, and the other way round. Raises `InvalidRequestError` if the model has
        no template or the template rejects the messages.
        """
        if any(_calls(message) for message in messages):
            messages = [self._with_arguments(message) for message in messages]
        return self._render(messages, template_kwargs)

    def _render(self, messages: Sequence[Mapping[str, Any]], template_kwargs: dict[str, Any]) -> str:
        template = self._select(template_kwargs.pop("chat_template", None), bool(template_kwargs.get("tools")))
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens}
        values.update(template_kwargs)
        try:
            return template.render(messages=list(messages), **values)
        except jinja2.TemplateError as error:
            if isinstance(error, jinja2.UndefinedError):
                raise self._failed(messages, error) from error
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:
            # A template is a program: given unexpected messages, it can raise anything.
            raise self._failed(messages, error) from error

    def source(self, with_tools: bool = False) -> str:
        """The template that conversations with or without tools get, "" if the model has none."""
        return self._sources.get(self._name(with_tools), "")

    def _with_arguments(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message with the arguments of its tool calls as the template takes them."""
        calls = _calls(message)
        if not calls:
            return message
        convert = _as_text if self._takes_arguments_as_text else _as_object
        return {**message, "tool_calls": [_converted(call, convert) for call in calls]}

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Return whether the arguments of earlier tool calls have to be JSON as text. Most templates want objects."""
        as_object = self._render_call({"wolf": "ran"})
        if as_object is not None:
            return "{'wolf': 'ran'}" in as_object  # printed as Python prints it
        as_text = self._render_call('{"wolf": "ran"}')
        return as_text is not None and '{"wolf": "ran"}' in as_text

    def _render_call(self, arguments: Any) -> str | None:
        """A conversation with a tool call of these arguments, None if the template fails on it."""
        function = {"name": "f", "arguments": arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "call00001", "name": "f"},
        ]
        tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
        try:
            return self._render(messages, {"tools": tools})
        except InvalidRequestError:
            return None

    def _failed(self, messages: Sequence[Any], error: Exception) -> InvalidRequestError:
        roles = [
            message.get("role") if isinstance(message, Mapping) else type(message).__name__ for message in messages
        ]
        return InvalidRequestError(
            f"the model's chat template failed on these messages (roles {roles[:20]}): {type(error).__name__}: {error}"
            '; each message should be like {"role": "user", "content": "text"}'
        )

    def _select(self, name: str | None, with_tools: bool) -> jinja2.Template:
        if not self._templates:
            raise InvalidRequestError(_NO_TEMPLATE)
        if name is None:
            name = self._name(with_tools)
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequestError(f"this model has no chat template {name!r}; it has {sorted(self._templates)}")
        return template

    def _name(self, with_tools: bool) -> str:
        return TOOL_USE if with_tools and TOOL_USE in self._sources else DEFAULT


def _calls(message: Any) -> list[Any]:
    """The tool calls of a message."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return calls if isinstance(calls, list) else []


def _converted(call: Any, convert: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": convert(function.get("arguments"))}}


def _as_text(arguments: Any) -> str:
    return (
        arguments
        if isinstance(arguments, str)
        else json.dumps(arguments or {}, ensure_ascii=False, separators=(",", ":"))
    )


def _as_object(arguments: Any) -> Any:
    """Arguments as an object. Text that is not a JSON object, as a model may have written it, stays text."""
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
        return read if isinstance(read, dict) else arguments
    return arguments or {}


def source_of(value: str, directory: Path, setting: str) -> str:
    """The chat template that `option.chat_template` means: Jinja text, or a file, in `directory` if it is relative.

    A value with a brace or a line break is a text if it names no file (vLLM's rule). `setting` is the option as the
    error shows it. Raises TokenizerError.
    """
    if os.path.isfile(file := directory / value):  # noqa: PTH113  (`Path.is_file` raises OSError for a long text)
        return _text_of(file)
    if any(each in value for each in "{}\n"):
        return value
    raise TokenizerError(f"{setting}: there is no file {file}; expected a file, or a template in Jinja")


def read_sources(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Template sources of a model directory by name; empty if it has none.

    `chat_template.jinja` overrides `chat_template.json`, which overrides `tokenizer_config.json`;
    `additional_chat_templates/*.jinja` add names (the layout that transformers writes).
    """
    sources: dict[str, str] = {}
    configured = tokenizer_config.get("chat_template")
    if configured is None:
        configured = (read_object(path / "chat_template.json", TokenizerError) or {}).get("chat_template")
    if isinstance(configured, str):
        configured = {DEFAULT: configured}
    elif isinstance(configured, list):
        configured = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
    if isinstance(configured, dict):
        sources.update({str(name): text for name, text in configured.items() if isinstance(text, str)})
    single = path / "chat_template.jinja"
    if single.exists():
        sources[DEFAULT] = _text_of(single)
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        sources[extra.stem] = _text_of(extra)
    return sources


def _text_of(file: Path) -> str:
    try:
        return content_of(file, MOST_JSON_BYTES, TokenizerError).decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file} is not UTF-8 text ({error}); save it as UTF-8") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; serving renders only its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """Computes constant expressions, such as 9**9**9, while rendering a template, not while reading it."""

    intercepted_binops = frozenset({"**", "*", "%"})


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would be wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# -- in the process that renders ---------------------------------------------------------------------------------------

_prepared: ChatTemplate | None = None
"""The template of this process."""


def prepare(sources: Mapping[str, str], special_tokens: Mapping[str, Any], origin: Path) -> None:
    """Compile the templates that `render` renders in this process. Raises TokenizerError."""
    global _prepared
    _prepared = ChatTemplate(sources, special_tokens, origin)
    _prepared.compile()


def render(conversation: bytes) -> str:
    """The prompt of a conversation, which is its messages and keywords, pickled. Raises InvalidRequestError."""
    assert _prepared is not None
    messages, keywords = pickle.loads(conversation)  # noqa: S301  from the server
    try:
        return _prepared.render(messages, **keywords)
    except (TypeError, MemoryError) as error:
        raise InvalidRequestError(f"the model's chat template failed: {type(error).__name__}: {error}") from None

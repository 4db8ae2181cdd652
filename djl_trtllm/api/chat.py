"""A chat request, whatever the dialect: its tools and what forces a call of them, its prompt, and its output's parser.

Tools, tool choices and messages have OpenAI's form here, which is what chat templates read; a dialect with another form
turns it into this one first.
"""

import base64
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from djl_trtllm.api import content, output_parsers as parsers, parameters as kinds, sampling as shared
from djl_trtllm.api.base import ModelContext, Render
from djl_trtllm.api.parameters import Kind, Parameter, Problems, show
from djl_trtllm.api.sampling import read_schema
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.errors import PromptTooLongError, UnsupportedParameterError
from djl_trtllm.request import GenerationRequest, Guide, GuideKind, Sampling, ThinkingBudget

MOST_TOOLS = 128
_LONGEST_NAME = 256
_MODES = ("none", "auto", "required")


_NOT_KEYWORDS = {
    "messages": "the conversation is a field of the request",
    "tools": "tools are a field of the request",
    "chat_template": "the template is the model's",
    "self": "the renderer's own name",
}


def _read_keywords(value: Any) -> dict[str, Any]:
    keywords: dict[str, Any] = kinds.OBJECT.read(value)
    for name, why in _NOT_KEYWORDS.items():
        if name in keywords:
            raise ValueError(f" (without '{name}': {why})")
    return keywords


TEMPLATE_KEYWORDS = Kind(
    "an object with keywords of the model's chat template",
    _read_keywords,
    {"type": "object", "propertyNames": {"not": {"enum": list(_NOT_KEYWORDS)}}},
)
"""`chat_template_kwargs`."""


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Tools in OpenAI's form. Raises ValueError with a hint."""
    if type(value) is not list or len(value) > MOST_TOOLS:
        raise ValueError("")
    for position, tool in enumerate(value):
        function = tool.get("function") if type(tool) is dict and tool.get("type") == "function" else None
        if type(function) is not dict or not is_name(function.get("name")):
            raise ValueError(f" (number {position} is none)")
        if type(function.get("parameters", {})) is not dict and function["parameters"] is not None:
            raise ValueError(f" (the parameters of {function['name']} are a JSON schema, an object)")
        if type(function.get("strict", False)) is not bool and function["strict"] is not None:
            raise ValueError(f" ('strict' of {function['name']} is true or false)")
    return value


def function_tool(
    given: Any, parameters: str, place: str, problems: Problems, name: str | None = None
) -> list[dict[str, Any]]:
    """Return a list with the tool that an object describes; empty, with a problem, for an object that describes none.

    The object has `name`, `description` and, in the member that `parameters` names, a JSON schema. `name`: the
    function's name as the model is shown it."""
    function: dict[str, Any] = {}
    if isinstance(given, dict) and is_name(given.get("name")):
        function = {key: given[key] for key in ("description", "strict") if given.get(key) is not None}
        function |= {"name": name or given["name"], "parameters": given.get(parameters)}
    try:
        return read_tools([{"type": "function", "function": function}])
    except ValueError:
        problems.invalid.append(
            f"'{place}' is {show(given)}: expected 'name', 'description' and '{parameters}', a JSON schema"
        )
        return []


def read_choice(value: Any) -> str | dict[str, str]:
    """The mode of a tool choice, or `{"name": ...}`."""
    if type(value) is str and value in _MODES:
        return value
    if type(value) is dict and value.get("type") == "function":
        function = value.get("function")
        if type(function) is dict and is_name(function.get("name")):
            return {"name": function["name"]}
    raise ValueError("")


def is_name(value: Any) -> bool:
    """Whether a value can be the name of a function."""
    return type(value) is str and 0 < len(value) <= _LONGEST_NAME


_TOOLS = f'a list of up to {MOST_TOOLS} of {{"type": "function", "function": {{"name", "description", "parameters"}}}}'
_CHOICE = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'


def _function_schema(**members: Any) -> dict[str, Any]:
    name = {"type": "string", "minLength": 1, "maxLength": _LONGEST_NAME}
    function = {"type": "object", "properties": {"name": name, **members}, "required": ["name"]}
    properties = {"type": {"const": "function"}, "function": function}
    return {"type": "object", "properties": properties, "required": ["type", "function"]}


_TOOL_SCHEMA = _function_schema(
    description={},
    parameters={"anyOf": [{"type": "object"}, {"type": "null"}]},
    strict={"anyOf": [{"type": "boolean"}, {"type": "null"}]},
)
_TOOLS_SCHEMA = {"type": "array", "items": _TOOL_SCHEMA, "maxItems": MOST_TOOLS}
_CHOICE_SCHEMA = {"anyOf": [{"enum": [*_MODES]}, _function_schema()]}

TOOLS = (
    Parameter(("tools",), Kind(_TOOLS, read_tools, _TOOLS_SCHEMA), "tools"),
    Parameter(
        ("tool_choice",), Kind(_CHOICE, read_choice, _CHOICE_SCHEMA), "tool_choice", needs=(GuideKind.JSON_SCHEMA,)
    ),
    Parameter(("parallel_tool_calls",), kinds.BOOLEAN, "parallel_tool_calls"),
)
"""Rows for the parameter tables."""

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

THINKING = (
    Parameter(("enable_thinking",), kinds.BOOLEAN, "enable_thinking"),
    Parameter(("reasoning_effort",), kinds.one_of(f"one of {', '.join(_EFFORTS)}", *_EFFORTS), "reasoning_effort"),
    Parameter(("include_reasoning",), neutral=(True,)),
    Parameter(
        ("thinking_token_budget", "thinking_budget", "max_thinking_tokens"),
        kinds.integer(1, shared.MOST_TOKENS),
        "thinking_budget",
    ),
    *(
        Parameter((name,), advice="use 'thinking_token_budget', or 'enable_thinking' for none")
        for name in ("thinking", "reasoning")
    ),
)
"""Rows of parameters that become keywords of a chat template where it has them, and of those that are refused."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request whose model may call them.

    `parser` makes the parser of each sequence; None if calls stay in the text. `shown_tokens` are the markers it looks
    for. `guide` constrains the output to calls. `parallel`: more than one call is returned.
    """

    parser: Callable[[], parsers.OutputParser] | None
    format: parsers.ToolFormat
    shown_tokens: tuple[str, ...] = ()
    guide: Guide | None = None
    parallel: bool = True


def tools_problem(model: ModelContext) -> str | None:
    """The reason why a model refuses `tools` that it need not call; None if it takes them."""
    source = model.tokenizer.chat_source(True)
    if "tools" not in source:
        return "the model's chat template has no place for tools"
    if parsers.tool_format(model.options.tool_call_parser, source) is not None:
        return None
    names = [name for name in OPTIONS["tool_call_parser"].type.choices if name in parsers.TOOLS]
    return (
        "the model's chat template does not show how the model writes tool calls: set option.tool_call_parser to one "
        f"of {', '.join(names)}, or to none to get them as text"
    )


def read_tool_use(values: dict[str, Any], model: ModelContext, problems: Problems) -> ToolUse | None:
    """The use of tools that `tools` and `tool_choice` ask for. None if the model is not shown any."""
    tools: list[dict[str, Any]] = values.get("tools", [])
    choice = values.get("tool_choice", "auto")
    forced = choice not in ("none", "auto")
    if forced and not tools:
        problems.invalid.append(f"'tool_choice' is {show(choice)} and there are no 'tools': give at least one")
    if choice == "none" or not tools:
        return None
    source, setting = model.tokenizer.chat_source(True), model.options.tool_call_parser
    problem = tools_problem(model)
    own = parsers.tool_format(setting, source)
    if problem is not None and not (forced and "tools" in source):
        problems.unsupported.append(f"'tools' is given, and {problem}")
        return None
    parallel = values.get("parallel_tool_calls", True)
    if forced:
        guide = _guide(choice, tools, parallel, values, problems)
        parser = (
            functools.partial(parsers.call_parser, parsers.REQUIRED, {})
            if choice == "required"
            else functools.partial(parsers.NamedParser, choice["name"])
        )
        return ToolUse(parser, own or parsers.REQUIRED, (), guide, parallel)
    assert own is not None
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    own_parser = None if setting == "none" else functools.partial(parsers.call_parser, own, schemas)
    return ToolUse(own_parser, own, own.markers, None, parallel)


def in_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as turns: the system messages before the first answer become one, in front, and neighbours of one
    role are joined. Many templates refuse anything else, or leave it out."""
    first = next((at for at, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    turns: list[list[dict[str, Any]]] = []
    for message in sorted(messages[:first], key=lambda message: message["role"] != "system") + messages[first:]:
        if turns and message["role"] == turns[-1][0]["role"] != "tool":
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_joined(turn) for turn in turns]


def _joined(turn: list[dict[str, Any]]) -> dict[str, Any]:
    """One message of several. Each text is copied once, however many there are."""
    joined = dict(turn[0])
    if "content" in joined:
        joined["content"] = content.join(
            [part for message in turn for part in content.parts_of(message.get("content") or "")]
        )
    if thoughts := [text for message in turn if (text := message.get("reasoning_content"))]:
        joined["reasoning_content"] = "\n".join(thoughts)
    calls = [call for message in turn for call in message.get("tool_calls", ())]
    return joined | {"tool_calls": calls} if calls else joined


def as_opaque(text: str) -> str:
    """Reasoning in the form of a field that clients send back unread. It is encoded, not encrypted."""
    return base64.b64encode(text.encode()).decode()


def from_opaque(value: Any) -> str:
    """The text of `as_opaque`, "" for anything else."""
    try:
        return base64.b64decode(value, validate=True).decode() if type(value) is str else ""
    except ValueError:
        return ""


def fit_messages(messages: list[dict[str, Any]], model: ModelContext, problems: Problems) -> dict[str, Any]:
    """The fields `messages`, as the model's chat template takes them, and `images` of a `GenerationRequest`.

    The role `developer` is `system` for a template that does not know it, and ids of tool calls have its form.
    Rendering does the same with their arguments (`ChatTemplate.render`).
    """
    messages, images = content.take_images(messages)
    source = model.tokenizer.chat_source(True)
    content.check_images(images, source, model.options, problems)
    if _DEVELOPER not in source:
        messages = [each | {"role": "system"} if each.get("role") == _DEVELOPER else each for each in messages]
    if any("tool_calls" in message or "tool_call_id" in message for message in messages):
        own = parsers.tool_format(model.options.tool_call_parser, source) or parsers.REQUIRED
        ids: dict[str, str] = {}
        messages = [_fit(message, f"messages[{at}]", own, ids, problems) for at, message in enumerate(messages)]
    return {"messages": messages, "images": images}


def _fit(
    message: dict[str, Any], where: str, own: parsers.ToolFormat, ids: dict[str, str], problems: Problems
) -> dict[str, Any]:
    """Return one message as the template takes it. `ids` has the template's ids of earlier calls, by their own ids."""
    message = dict(message)
    if type(own_id := message.get("tool_call_id")) is str:
        message["tool_call_id"] = ids.get(own_id) or own.fit_id(own_id)
    calls = message.pop("tool_calls", None)
    if not calls:
        return message  # templates ask whether the key is there
    fitted: list[dict[str, Any]] = []
    for position, call in enumerate(calls if type(calls) is list else [calls]):
        function = call.get("function") if type(call) is dict else None
        arguments = function.get("arguments") if type(function) is dict else None
        if type(function) is not dict or type(function.get("name")) is not str or type(arguments) not in _ARGUMENTS:
            problems.invalid.append(
                f"'{where}.tool_calls[{position}]' is {show(call)}: expected "
                '{"id", "type": "function", "function": {"name", "arguments": JSON as text}}'
            )
            continue
        fitted.append(dict(call))
        if type(call.get("id")) is str:
            fitted[-1]["id"] = ids[call["id"]] = own.fit_id(call["id"], function["name"], len(ids))
    if message.get("content") is None:
        message["content"] = ""  # templates look into it
    return message | {"tool_calls": fitted}


_ARGUMENTS = (str, dict, type(None))
_DEVELOPER = "developer"


def _guide(
    choice: Any, tools: list[dict[str, Any]], parallel: bool, values: dict[str, Any], problems: Problems
) -> Guide | None:
    """The guide of a forced call: the grammar of a list of calls, or of the arguments of the one function."""
    if values.get("guide") is not None:
        problems.invalid.append(
            f"'tool_choice' is {show(choice)}, and another parameter constrains the output too: give one of them"
        )
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if choice != "required" and choice["name"] not in functions:
        problems.invalid.append(
            f"'tool_choice' is {show(choice['name'])}: expected one of the tools, {show(sorted(functions))}"
        )
        return None
    try:
        if choice == "required":
            strict = any(function.get("strict") for function in functions.values())
            return read_schema(_list_schema(functions, parallel), strict)
        function = functions[choice["name"]]
        return read_schema(_parameters(function), function.get("strict"))
    except ValueError as error:
        problems.invalid.append(f"'tools' cannot be turned into one JSON schema{error}")
        return None


def _list_schema(functions: dict[str, dict[str, Any]], parallel: bool) -> dict[str, Any]:
    definitions: dict[str, dict[str, Any]] = {}
    items: list[dict[str, Any]] = []
    for name, function in functions.items():
        parameters = dict(_parameters(function))
        for keyword in ("$defs", "definitions"):
            # References are to the root of the schema.
            own = parameters.pop(keyword, {})
            if type(own) is not dict:
                raise ValueError(f" ({keyword} of {show(name)} is no object)")
            for key, value in own.items():
                if definitions.setdefault(keyword, {}).setdefault(key, value) != value:
                    raise ValueError(f" ({show(key)} in {keyword} differs between functions)")
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
        items.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": items}, **definitions}


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Parsing:
    """The calls and the reasoning that the output may have."""

    tools: ToolUse | None
    reasoning: str

    @property
    def needed(self) -> bool:
        return self.reasoning != "none" or (self.tools is not None and self.tools.parser is not None)

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """The special tokens that the parsers have to see."""
        tools = () if self.tools is None else self.tools.shown_tokens
        return (*tools, *parsers.reasoning_markers(self.reasoning))

    def parser(self, prompt: str) -> parsers.OutputParser:
        """The parser of one sequence after this prompt."""
        parser = (
            self.tools.parser() if self.tools is not None and self.tools.parser is not None else parsers.PlainParser()
        )
        return parsers.with_reasoning(self.reasoning, parser, prompt)


def chat_request(
    values: dict[str, Any], sampling: Sampling, logprobs: bool, tools: ToolUse | None, model: ModelContext
) -> tuple[GenerationRequest, Parsing]:
    """The request of the values that a table and `fit_messages` have read, and what to look for in its output.

    Raises UnsupportedParameterError for a budget where it is not known how the model ends its reasoning.
    """
    set_thinking(values, model)
    if tools is None:
        values.pop("tools", None)
    elif tools.guide is not None:
        values["guide"] = tools.guide
    generation = shared.generation_request(values, sampling, logprobs, template=read_template(values))
    parsing = Parsing(tools, _reasoning(model, values))
    if (budget := _thinking_budget(values, parsing, model)) is not None:
        generation = replace(generation, thinking=budget)
    if not parsing.needed:
        return generation, parsing
    guide_from = "tool_choice" if tools is not None and tools.guide is not None else None
    return replace(generation, shown_tokens=parsing.shown_tokens, guide_from=guide_from), parsing


def thinking_problem(model: ModelContext) -> str | None:
    """The reason why a model's reasoning cannot be ended at a budget; None if it can."""
    source = model.tokenizer.chat_source(False)
    setting = parsers.reasoning_format(model.options.reasoning_parser, source)
    if parsers.thinking_budget(setting, 1, None) is not None:
        return None
    if setting != "none":
        return f"reasoning in the format {setting} is in channels, which no text ends: use 'reasoning_effort'"
    return "it is not known how the model writes reasoning: set option.reasoning_parser, or leave the budget out"


def _thinking_budget(values: dict[str, Any], parsing: Parsing, model: ModelContext) -> ThinkingBudget | None:
    tokens = values.get("thinking_budget")
    if tokens is None or values.get("guide") is not None:  # a guide leaves no room for reasoning
        return None
    budget = parsers.thinking_budget(parsing.reasoning, tokens, None if parsing.tools is None else parsing.tools.format)
    if budget is None:
        raise UnsupportedParameterError(f"'thinking_token_budget' is {tokens}, and {thinking_problem(model)}")
    return budget


def prompt_text(values: dict[str, Any], model: ModelContext, render: Render | None) -> str:
    """The prompt of a chat that is only tokenised. `render` waits for the process that renders chats."""
    messages, template = values["messages"], read_template(values) or {}
    return model.tokenizer.render_chat(messages, **template) if render is None else render(messages, template)


_MOST_CHARACTERS = 2**20
"""The longest text, or more if the model's prompts may be longer: a megabyte takes a second, and 100 MB of memory."""
_CHARACTERS_OF_A_TOKEN = 16


def token_ids(text: str, model: ModelContext, *, special: bool) -> list[int]:
    """Tokenise a text from which nothing is generated. Raises PromptTooLongError first if it is too long."""
    most = max(_MOST_CHARACTERS, _CHARACTERS_OF_A_TOKEN * (model.options.max_input_len or 0))
    if len(text) > most:
        raise PromptTooLongError(f"the text has {len(text)} characters: expected at most {most}")
    return model.tokenizer.encode(text, special)


def set_thinking(values: dict[str, Any], model: ModelContext) -> None:
    """Make `enable_thinking` and `reasoning_effort` keywords of the model's chat template, where it has them.

    Effort "none" turns thinking off. A keyword that the request sets in `chat_template_kwargs` stays.
    """
    source, effort = model.tokenizer.chat_source("tools" in values), values.get("reasoning_effort")
    keywords = {name: values[name] for name in ("enable_thinking", "reasoning_effort") if name in values}
    if effort == "none":
        keywords.setdefault("enable_thinking", False)
    known = {name: value for name, value in keywords.items() if name in source}
    if known:
        values["chat_template_kwargs"] = known | values.get("chat_template_kwargs", {})


def read_template(values: dict[str, Any]) -> dict[str, Any] | None:
    """The chat template's keywords among the values of a request, None if there are none."""
    template: dict[str, Any] = dict(values.get("chat_template_kwargs", {}))
    if values.get("tools"):
        template["tools"] = values["tools"]
    if "add_generation_prompt" in values:
        template["add_generation_prompt"] = values["add_generation_prompt"]
    return template or None


def _reasoning(model: ModelContext, values: dict[str, Any]) -> str:
    """The format of the reasoning in the output: "none" with a guide, which leaves no room for it."""
    if values.get("guide") is not None:
        return "none"
    return parsers.reasoning_format(model.options.reasoning_parser, model.tokenizer.chat_source("tools" in values))

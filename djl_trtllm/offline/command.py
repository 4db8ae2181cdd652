"""`djl-trtllm generate`: the prompts of a file in, JSON lines out."""

import codecs
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import orjson
from rich.console import Console

from djl_trtllm.api import sampling
from djl_trtllm.api.base import CollectedSequence, dump_line
from djl_trtllm.api.chat import read_template
from djl_trtllm.api.content import read_texts
from djl_trtllm.api.dialects.lmi import dialect as lmi
from djl_trtllm.api.dialects.lmi.dialect import INPUTS_PARAMETERS
from djl_trtllm.api.dialects.openai.dialect import CHAT_FIELDS
from djl_trtllm.api.parameters import Problems, Table, show
from djl_trtllm.config import Options
from djl_trtllm.config.options.choices import UnknownParameters
from djl_trtllm.errors import DjlTrtllmError, InvalidRequestError
from djl_trtllm.offline.llm import OfflineResult, Runner, open_offline_model
from djl_trtllm.progress import batch_progress
from djl_trtllm.request import FINISH_WORDS, FinishReason, GenerationRequest

# -- files of prompts --------------------------------------------------------------------------------------------------

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
"""The suffixes of files that are JSON lines."""

_SHAPES_ANSWERS = (
    "stream",
    "stream_options",
    "output_formatter",
    "details",
    "return_full_text",
    "decoder_input_details",
    "tools",
)
_MOST_PROBLEMS = 10
_STRICT = Options(unknown_parameters=UnknownParameters.REFUSE)


class Entry(NamedTuple):
    """A prompt of a file. `id` is the line's own, or the number of the line (from 1)."""

    id: str | int | float
    request: GenerationRequest


def read_entries(data: bytes, name: str, parameters: Mapping[str, Any], *, json_lines: bool) -> list[Entry]:
    """The prompts of a file; empty lines are left out.

    `name` is the file's in messages. `parameters` are parameters of the LMI schema for every line; a line's own win.
    Raises InvalidRequestError for parameters that are wrong, and for lines that are, with their numbers.
    """
    _refuse_shapes(parameters)
    template = _parse({"inputs": "-", "parameters": parameters})
    lines = data.split(b"\n")
    entries: list[Entry] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if json_lines:
                entries.append(_read_object(_decode(line), number, parameters))
            else:
                entries.append(Entry(number, msgspec.structs.replace(template, prompt=line.rstrip(b"\r").decode())))
        except UnicodeDecodeError as error:
            problems.append(f"{name}:{number}: the line is not UTF-8: {error}")
        except InvalidRequestError as error:
            problems.append(f"{name}:{number}: {error}")
    if problems:
        shown = problems[:_MOST_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} lines more")
        raise InvalidRequestError("\n".join(shown))
    return entries


def _decode(line: bytes) -> dict[str, Any]:
    try:
        payload = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the line is not JSON: {error.msg} at column {error.colno}") from None
    if type(payload) is not dict:
        raise InvalidRequestError(f"the line is {show(payload)}: expected a JSON object")
    return payload


def _read_object(line: dict[str, Any], number: int, defaults: Mapping[str, Any]) -> Entry:
    payload = dict(line)
    id_ = payload.pop("id", None)
    if id_ is not None and type(id_) not in (str, int, float):
        raise InvalidRequestError(f"'id' is {show(id_)}: expected a string or a number")
    own = payload.pop("parameters", None) or {}
    if type(own) is not dict:
        raise InvalidRequestError(f"'parameters' is {show(own)}: expected an object")
    if sum(name in payload for name in ("prompt", "inputs", "messages")) != 1:
        raise InvalidRequestError("expected exactly one of 'prompt', 'inputs' and 'messages'")
    if "prompt" in payload:
        payload["inputs"] = payload.pop("prompt")
    _refuse_shapes(payload)
    _refuse_shapes(own)
    if "messages" in payload:
        if twice := sorted(own.keys() & payload.keys()):
            raise InvalidRequestError(f"'{twice[0]}' stands in 'parameters' and beside 'messages': give one")
        request = _parse_chat(_fill(payload | own, defaults, CHAT_FIELDS))
    else:
        request = _parse(payload | {"parameters": _fill(own, defaults, INPUTS_PARAMETERS)})
    return Entry(number if id_ is None else id_, request)


def _refuse_shapes(given: Mapping[str, Any]) -> None:
    """Refuse parameters that have no effect on the lines of results."""
    for name in _SHAPES_ANSWERS:
        if given.get(name):
            raise InvalidRequestError(
                f"'{name}' changes the shape of HTTP responses, and the lines written here have one shape: leave it out"
            )


def _fill(given: dict[str, Any], defaults: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """The parameters of `given`, and those `defaults` that `given` has under none of their names."""
    given = {name: value for name, value in given.items() if value is not None}
    taken = {alias for name in given if name in table.rows for alias in table.rows[name].names}
    return {name: value for name, value in defaults.items() if name not in taken} | given


def _parse(payload: dict[str, Any]) -> GenerationRequest:
    try:
        (request,) = lmi.parse_payload(payload, _STRICT).requests
    except InvalidRequestError as error:
        raise type(error)(str(error).removeprefix(lmi.PREFIX)) from None
    return request


def _parse_chat(payload: dict[str, Any]) -> GenerationRequest:
    problems = Problems()
    messages = read_texts(payload["messages"], problems)
    values = CHAT_FIELDS.read(payload, problems, "field")
    values.setdefault("do_sample", True)
    chosen = sampling.read_sampling(values, problems)
    problems.raise_any()
    logprobs = values.get("logprobs", False)
    return sampling.generation_request(values, chosen, logprobs, messages=messages, template=read_template(values))


# -- lines of results --------------------------------------------------------------------------------------------------


def format_line(entry: Entry, result: OfflineResult) -> bytes:
    """`{"id", "prompt", "generated_text", "finish_reason", "tokens", "error"}` and a line end.

    `tokens` is the number of generated tokens. With `n` above 1 the best sequence comes first, and
    `best_of_sequences` holds the others. `error` is null, or why the prompt failed; the text is then what there is.
    """
    best, *others = result.sequences
    prompt = entry.request.prompt if result.prompt is None else result.prompt.text
    line: dict[str, Any] = {"id": entry.id, "prompt": prompt, **_shown(best)}
    if others:
        line["best_of_sequences"] = [_shown(other) for other in others]
    line["error"] = None if result.failure is None else str(result.failure)
    return dump_line(line) + b"\n"


def _shown(sequence: CollectedSequence) -> dict[str, Any]:
    finished = sequence.finished
    return {
        "generated_text": sequence.text,
        "finish_reason": FINISH_WORDS[FinishReason.ERROR if finished is None else finished.reason],
        "tokens": 0 if finished is None else finished.generated_tokens,
    }


_STANDARD = Path("-")


def generate_file(
    model: str, prompts: Path, out: Path, parameters: Mapping[str, Any], console: Console, *, text: bool = False
) -> int:
    """Continue the prompts of a file, and write a line for each in their order, as soon as it is known.

    `-` is stdin and stdout. `parameters` are parameters of the LMI schema for all lines; `text`: the file is text
    whatever it looks like. Progress goes to the console. All lines are read and checked before anything else is done.
    Returns how many prompts failed. Raises DjlTrtllmError if nothing could be run, BrokenPipeError when nobody reads
    the output any more.
    """
    data = _read(prompts).removeprefix(codecs.BOM_UTF8)
    json_lines = not text and (prompts.suffix in JSON_SUFFIXES or data.lstrip()[:1] == b"{")
    entries = read_entries(data, "stdin" if prompts == _STANDARD else str(prompts), parameters, json_lines=json_lines)
    if not entries:
        console.print(f"{prompts} has no prompts", markup=False, highlight=False)
        return 0
    if out != _STANDARD and out.exists() and prompts != _STANDARD and out.samefile(prompts):
        raise DjlTrtllmError(f"--out {out} is the file of the prompts: name another")
    failed = 0
    with _opened(out) as stream, closing(Runner(open_offline_model(model, {}))) as runner:
        if out != _STANDARD and out.is_file():
            stream.truncate(0)  # earlier results stay until the model can be run
        begun = time.monotonic()
        results = runner.run(entry.request for entry in entries)
        total, shown = len(entries), batch_progress(len(entries), lambda: runner.generated_tokens, console)
        with closing(results), shown as advance:
            for entry, result in zip(entries, results, strict=True):
                stream.write(format_line(entry, result))
                stream.flush()
                failed += result.failure is not None
                advance()
        console.print(
            f"{total} prompts, {runner.generated_tokens} tokens in {time.monotonic() - begun:.1f} s"
            + (f'; {failed} prompts failed, see "error" in their lines' if failed else ""),
            highlight=False,
        )
    return failed


def _read(path: Path) -> bytes:
    if path == _STANDARD:
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as error:
        raise DjlTrtllmError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if path == _STANDARD:
        yield sys.stdout.buffer
        return
    try:
        stream = path.open("ab")
    except OSError as error:
        raise DjlTrtllmError(f"{path} cannot be written: {error.strerror}") from None
    with stream:
        yield stream

"""Several bodies at one address: `{"prompt": ...}` on `/invocations` is a completion of OpenAI's API.

LMI's async mode (djl_python 0.33 and later) identifies bodies by their members, and sends streams as lines: OpenAI's
events without `data: ` and without `[DONE]`. The table is `BODIES` in `api/registry.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from djl_trtllm.api.base import Dialect, Prompt, ResponseEncoder
from djl_trtllm.config import Task
from djl_trtllm.errors import InvalidRequestError, RequestError
from djl_trtllm.request import OutputChunk

_EVENT = b"data: "
_DONE = b"[DONE]"


class Body(NamedTuple):
    """A body that an address takes: one with `member`, and with `mark`, a header or a member, if that is given.

    It is parsed as the body of `path` of `dialect`, or if that is None, as the address's own. The first row that fits
    is the one, so a row with a `mark` stands before that without. It is for models of one `task`.
    """

    member: str
    dialect: Dialect | None = None
    path: str = ""
    mark: str = ""
    task: Task = Task.GENERATE

    def fits(self, payload: Mapping[str, Any], properties: Mapping[str, str]) -> bool:
        marked = not self.mark or self.mark in properties or self.mark in payload
        return marked and payload.get(self.member) is not None


def find_body(
    bodies: Sequence[Body], payload: Mapping[str, Any], properties: Mapping[str, str], task: Task
) -> Body | None:
    """The row of a payload to a model of a task, None if it has none of the members of any task.

    Raises InvalidRequestError for several of them, and for members of other tasks alone.
    """
    others = [body for body in bodies if body.task is not task and body.fits(payload, properties)]
    bodies = [body for body in bodies if body.task is task]
    if others and not any(body.fits(payload, properties) for body in bodies):
        named = " or ".join(dict.fromkeys(f"'{body.member}'" for body in bodies))
        raise InvalidRequestError(
            f"the body has '{others[0].member}', and this model is for option.task={task}: expected {named}"
        )
    members = list(dict.fromkeys(body.member for body in bodies if payload.get(body.member) is not None))
    if len(members) > 1:
        named = " and ".join(f"'{member}'" for member in members)
        raise InvalidRequestError(f"the body has {named}: expected one of them, which are bodies of different APIs")
    return next((body for body in bodies if body.fits(payload, properties)), None)


class LinesEncoder(ResponseEncoder):
    """The events of another encoder as lines of JSON."""

    stream = True
    content_type = "application/jsonlines"

    def __init__(self, events: ResponseEncoder) -> None:
        self._events = events
        self.wants_prompt_tokens = events.wants_prompt_tokens

    def begin(self, prompt: Prompt) -> None:
        self._events.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        return _lines(self._events.encode(chunk).split(b"\n"))

    def error(self, error: RequestError) -> bytes:
        return _lines(self._events.error(error).split(b"\n"))


def _lines(events: Iterable[bytes]) -> bytes:
    data = (line[len(_EVENT) :] for line in events if line.startswith(_EVENT))
    return b"".join([line + b"\n" for line in data if line != _DONE])

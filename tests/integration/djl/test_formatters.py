"""The same tokens through djl_python's own formatters and through ours: equal answers, but for what differs on purpose.

What this says of the encoders holds for the golden files of `tests/api/golden` too: they are made of the same tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api.dialects.lmi import dialect as lmi
from djl_trtllm.config import Options
from djl_trtllm.request import FINISH_WORDS, FinishReason, OutputChunk, SequenceResult, Token
from tests.api.models import EOS, FAILED, FAILURE, PROMPT, STOP, answer, several
from tests.integration.djl.engines import djl_python

pytestmark = pytest.mark.slow

SCRIPTS = {
    "eos": EOS,
    "stop": STOP,
    "error": FAILED,
    "line_ends": [
        OutputChunk(0, [Token(1, "a\x85b\u2028c\u2029", -1.0, False)], None),
        OutputChunk(0, [Token(2, "\n\r\f", -1.0, False)], SequenceResult(FinishReason.LENGTH, 2, -2.0, 7)),
    ],
    "several": several(3),
}


@dataclass
class Case:
    """A request, the options of the model, and the name of what is generated for it."""

    script: str
    payload: dict[str, Any]
    defaults: Options = Options()  # noqa: RUF009  immutable

    def __str__(self) -> str:
        options = ["tgi_compat"] if self.tgi else []
        kind = self.defaults.output_formatter or "default"
        parameters = self.payload.get("parameters", {})
        stream = "stream" if self.stream else "whole"
        return "-".join([self.script, kind, stream, *options, *(f"{k}={v}" for k, v in parameters.items())])

    @property
    def stream(self) -> bool:
        return bool(self.payload.get("stream"))

    @property
    def tgi(self) -> bool:
        return self.defaults.tgi_compat

    def for_djl(self) -> dict[str, Any]:
        """What `djl_formatters.py` reads."""
        steps: list[tuple[int, list[object], str | None]] = []
        for update in SCRIPTS[self.script]:
            index, tokens, finished = update.index, update.tokens, update.finished
            shown = [_token(token) for token in tokens]
            if finished is not None and finished.error is not None:
                shown.append([-1, "", -1.0, True, str(finished.error)])
            elif finished is not None and not tokens:
                # An end without a token: DJL has no such thing, its engine's last token is a special one without text.
                shown.append([steps[-1][1][0], "", 0.0, True, None])
            steps += [(index, token, None) for token in shown]
            if finished is not None:
                steps[-1] = (index, shown[-1], FINISH_WORDS[finished.reason])
        return {
            "payload": self.payload,
            "configs": {name: getattr(self.defaults, name) for name in ("output_formatter", "tgi_compat")},
            "prompt": PROMPT.text,
            "prompt_tokens": [_token(token) for token in PROMPT.tokens],
            "steps": steps,
        }

    def ours(self) -> tuple[str, str]:
        """Content type and body of our answer."""
        encoder = lmi.parse_payload(self.payload, self.defaults).encoder
        return encoder.content_type, answer(encoder, SCRIPTS[self.script]).decode()


def _token(token: Token) -> list[object]:
    return [token.id, token.text, token.logprob, token.special or None, None]


VIEWS: tuple[dict[str, Any], ...] = (
    {},
    {"details": False},
    {"details": True},
    {"details": True, "decoder_input_details": True},
    {"return_full_text": True},
    {"details": True, "return_full_text": True},
)


def cases() -> Iterator[Case]:
    for script in ("eos", "stop", "error", "line_ends"):
        # A whole answer that fails is a status here, and was sent as an answer by DJL.
        for stream in (True,) if script == "error" else (False, True):
            for parameters in VIEWS:
                inputs = {"inputs": PROMPT.text, "parameters": parameters, "stream": stream}
                for tgi_compat in (False, True):
                    yield Case(script, inputs, Options(tgi_compat=tgi_compat))
                if stream:
                    yield Case(script, inputs, Options(output_formatter="sse"))
                    yield Case(script, inputs, Options(output_formatter="jsonlines", tgi_compat=True))
    for parameters in ({"n": 3}, {"n": 3, "decoder_input_details": True}):
        for tgi_compat in (False, True):
            yield Case("several", {"inputs": PROMPT.text, "parameters": parameters}, Options(tgi_compat=tgi_compat))


CASES = tuple(cases())


@cache
def djls_answers() -> list[tuple[str, str]]:
    """Content type and body of djl_python's answer to each case."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("djl_formatters.py"))],
        input=json.dumps([case.for_djl() for case in CASES]),
        env={**os.environ, "PYTHONPATH": str(djl_python())},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [(found["content_type"], found["body"]) for found in json.loads(done.stdout)]


# -- what differs on purpose -------------------------------------------------------------------------------------------
# Each takes the objects of DJL's answer (one, or those of a stream's lines) and makes them what ours are.


def details_have_one_order(case: Case, objects: list[Any]) -> None:
    """DJL's begin with the prompt where there are several sequences, and elsewhere have it third."""
    for details in _details(objects) if case.script == "several" else ():
        for name in ("inputs", "tokens", "prefill", "best_of_sequences", "generated_text"):
            if name in details:
                details[name] = details.pop(name)


def tgis_tokens_always_say_whether_they_are_special(case: Case, objects: list[Any]) -> None:
    """TGI's own client requires it."""
    for token in _tokens(objects) if case.tgi else ():
        token.setdefault("special", False)


def tgis_details_have_its_seed_prefill_and_input_length(case: Case, objects: list[Any]) -> None:
    """TGI's own client requires them: `prefill` in whole answers, `input_length` in streams."""
    for details in _details(objects) if case.tgi else ():
        if "generated_tokens" not in details:
            continue
        # DJL's order, with the seed behind the prompt.
        finished = _finished(case, details)
        behind = ("tokens", "prefill", "best_of_sequences", "generated_text")
        rest = {name: details.pop(name) for name in behind if name in details}
        details["seed"] = finished.seed
        if case.stream:
            details["input_length"] = PROMPT.length
        else:
            rest = {"tokens": rest.pop("tokens"), "prefill": rest.pop("prefill", []), **rest}
        details |= rest


def an_error_in_a_stream_has_tgis_fields(case: Case, objects: list[Any]) -> None:
    """TGI's own client raises by them; DJL's stream ends as if nothing had happened."""
    if case.tgi and case.script == "error":
        objects[-1]["token"]["error_msg"] = str(FAILURE)
        objects[-1] |= {"error": str(FAILURE), "error_type": "generation"}


def an_end_is_no_token(case: Case, objects: list[Any]) -> None:
    """DJL counts an error's token, and lists an end without text as a token of its own."""
    if case.script == "error":
        for details in _details(objects):
            if "generated_tokens" in details:
                details["generated_tokens"] -= 1
    if case.script == "stop":
        for details in _details(objects):
            if not case.stream:
                details["tokens"].pop()


DIFFERENCES: tuple[Callable[[Case, list[Any]], None], ...] = (
    details_have_one_order,
    tgis_tokens_always_say_whether_they_are_special,
    tgis_details_have_its_seed_prefill_and_input_length,
    an_error_in_a_stream_has_tgis_fields,
    an_end_is_no_token,
)


def _details(objects: list[Any]) -> list[dict[str, Any]]:
    found = [item["details"] for item in objects if "details" in item]
    return [*found, *(other for details in found for other in details.get("best_of_sequences", ()))]


def _tokens(objects: list[Any]) -> list[dict[str, Any]]:
    found = [item["token"] for item in objects if "token" in item]
    lists = [details.get(name, ()) for details in _details(objects) for name in ("tokens", "prefill")]
    return [*found, *(token for tokens in lists for token in tokens)]


def _finished(case: Case, details: dict[str, Any]) -> Any:
    """How the sequence of these details ended."""
    ends = [update.finished for update in SCRIPTS[case.script] if update.finished is not None]
    if case.script != "several":
        return ends[0]
    return ends[details["tokens"][0]["id"]]


# -- comparison --------------------------------------------------------------------------------------------------------


def parts(body: str) -> tuple[list[str], list[Any]]:
    """What stands around the JSON objects of an answer, and the objects."""
    around: list[str] = []
    objects: list[Any] = []
    for line in body.split("\n"):
        prefix = "data: " if line.startswith("data: ") else ""
        content = line[len(prefix) :]
        found = json.loads(content) if content else None
        listed = isinstance(found, list)
        around.append(f"{prefix}{'' if found is None else '[{}]' if listed else '{}'}")
        objects += [] if found is None else found if listed else [found]
    return around, objects


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_the_answer_is_djls_but_for_what_differs_on_purpose(number: int) -> None:
    case = CASES[number]
    theirs_type, theirs = djls_answers()[number]
    ours_type, ours = case.ours()
    assert ours_type == theirs_type
    our_lines, our_objects = parts(ours)
    their_lines, their_objects = parts(theirs)
    for difference in DIFFERENCES:
        difference(case, their_objects)
    assert our_lines == their_lines
    # As text, so that the order of names counts too.
    assert [json.dumps(found) for found in our_objects] == [json.dumps(found) for found in their_objects]


def test_every_difference_is_one() -> None:
    seen = set()
    for case, (_, body) in zip(CASES, djls_answers(), strict=True):
        for difference in DIFFERENCES:
            before, after = parts(body)[1], parts(body)[1]
            difference(case, after)
            if json.dumps(before) != json.dumps(after):
                seen.add(difference)
    assert [difference.__name__ for difference in DIFFERENCES if difference not in seen] == []

"""`option.unknown_parameters`: what every dialect makes of a field that it does not know."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from djl_trtllm.api import Dialect, RawRequest, parameters
from djl_trtllm.api.lmi import parse as lmi
from djl_trtllm.api.lmi.dialect import LMI
from djl_trtllm.api.openai.dialect import OPENAI
from djl_trtllm.api.parameters import IGNORED, Parameter, Problems, Table
from djl_trtllm.api.tgi.dialect import TGI
from djl_trtllm.api.triton.dialect import TRITON
from djl_trtllm.api.truss.dialect import TRUSS
from djl_trtllm.config import Options
from djl_trtllm.config.options.choices import UnknownParameters
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.model import Tokenizer
from tests.api.models import load
from tests.support.in_process import played_model

WARN = Options(unknown_parameters=UnknownParameters.WARN)
TABLE = Table((Parameter(("model",), target=IGNORED),), elsewhere={"stream": "beside 'parameters'"})
MESSAGES = [{"role": "user", "content": "Hello"}]
REQUESTS: list[tuple[Dialect, str, dict[str, Any]]] = [
    (LMI, "/invocations", {"inputs": "a wolf"}),
    (LMI, "/invocations", {"messages": MESSAGES}),
    (OPENAI, "/v1/chat/completions", {"messages": MESSAGES}),
    (OPENAI, "/v1/completions", {"prompt": "a wolf"}),
    (TGI, "/generate", {"inputs": "a wolf"}),
    (TRUSS, "/predict", {"prompt": "a wolf"}),
    (TRITON, "/v2/models/{model}/generate", {"text_input": "a wolf", "max_tokens": 5}),
]


@pytest.fixture(autouse=True)
def nothing_logged() -> Iterator[None]:
    parameters._logged.clear()
    yield
    parameters._logged.clear()


def warning(*names: str) -> str:
    problems = Problems.of(WARN)
    assert TABLE.read(dict.fromkeys(names, 1), problems, "field") == {}
    problems.raise_any()
    ((header, value),) = problems.headers
    assert header == "Warning"
    value.encode("ascii")
    start, end = '299 djl-trtllm "unknown and ignored: ', ' (option.unknown_parameters=warn)"'
    assert value.startswith(start) and value.endswith(end)
    return value.removeprefix(start).removesuffix(end)


@pytest.mark.parametrize(("dialect", "path", "body"), REQUESTS)
def test_an_unknown_field_is_refused_or_named_in_a_header(
    dialect: Dialect, path: str, body: dict[str, Any], tokenizer: Tokenizer
) -> None:
    request = RawRequest(orjson.dumps({**body, "tempratur": 1}), {}, path)
    with pytest.raises(InvalidRequestError, match=r"unknown \w+ .*tempratur"):
        dialect.parse(request, played_model(tokenizer))
    warning = played_model(tokenizer, Path(), unknown_parameters="warn")
    call = dialect.parse(request, warning)
    assert [name for name, _ in call.headers] == ["Warning"] and "tempratur" in call.headers[0][1]
    known = dialect.parse(RawRequest(orjson.dumps(body), {}, path), warning)
    assert known.headers == () and known.requests == call.requests


@pytest.mark.usefixtures("clean_imports")
@pytest.mark.parametrize("annotation", ["RequestOutput", "dict"])
def test_a_models_own_formatters_keep_the_header(annotation: str, tmp_path: Path) -> None:
    source = f"""
        from djl_python.output_formatter import output_formatter

        @output_formatter
        def write(output: "{annotation}"):
            return "x"
    """
    request = RawRequest(b'{"inputs": "a wolf", "tempratur": 1}', {})
    assert "tempratur" in load(tmp_path, source).parse(request, WARN).headers[0][1]


def test_an_adapter_of_a_header_keeps_the_header() -> None:
    properties = {"x-amzn-sagemaker-adapter-identifier": "dutch"}
    call = lmi.parse(b'{"inputs": "a wolf", "tempratur": 1}', None, WARN, properties)
    assert call.requests[0].adapter == "dutch" and "tempratur" in call.headers[0][1]


def test_names_are_written_so_that_a_header_can_have_them() -> None:
    assert warning("a", "b") == "a, b"
    assert warning('é"\r\n\\') == r"\xe9\"\r\n\\"
    assert warning("x" * 1000) == "x" * 80
    assert warning(*map(str, range(12))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_the_log_has_each_name_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warning("a", "b")
        warning("b")
    assert [record.getMessage() for record in caplog.records] == [
        'unknown field "a" in requests: ignored (option.unknown_parameters=warn)',
        'unknown field "b" in requests: ignored (option.unknown_parameters=warn)',
    ]


def test_the_log_has_not_very_many_names(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warning(*map(str, range(1010)))
    assert len(caplog.records) == 1000


def test_a_field_in_the_wrong_place_is_refused_either_way() -> None:
    problems = Problems.of(WARN)
    TABLE.read({"stream": True}, problems, "parameter")
    assert problems.invalid == ["'stream' belongs beside 'parameters'"] and problems.headers == ()

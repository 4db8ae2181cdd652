from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from djl_trtllm.api import RawRequest
from djl_trtllm.api.lmi.dialect import LMI
from djl_trtllm.api.lmi.errors import encode_error
from djl_trtllm.config import Options
from djl_trtllm.errors import OverloadedError
from djl_trtllm.model import Tokenizer
from djl_trtllm.service import Texts
from tests.api.models import load
from tests.api.tables import check_descriptions
from tests.support.in_process import played_model

PLAIN = {"content-type": "text/plain"}


def test_a_request_is_parsed_by_its_content_type_and_its_headers(tokenizer: Tokenizer) -> None:
    headers = {**PLAIN, "x-amzn-sagemaker-adapter-identifier": "dutch"}
    (request,) = LMI.parse(RawRequest(b"a wolf", headers), played_model(tokenizer)).requests
    assert (request.prompt, request.adapter) == ("a wolf", "dutch")
    (request,) = LMI.parse(RawRequest(b'{"inputs": "a fox"}', {}), played_model(tokenizer)).requests
    assert (request.prompt, request.adapter) == ("a fox", None)


@pytest.mark.parametrize(
    ("option", "body", "content_type", "shown"),
    [
        ("output_formatter", {"inputs": "a wolf"}, "application/jsonlines", "jsonlines"),
        ("tgi_compat", {"inputs": "a wolf", "stream": True}, "text/event-stream", True),
        ("bedrock_compat", {"prompt": "a wolf"}, "application/json", True),
    ],
)
def test_a_models_options_decide_what_a_request_leaves_open(
    tokenizer: Tokenizer, option: str, body: object, content_type: str, shown: Any
) -> None:
    model = played_model(tokenizer, Path(), **{option: shown})
    call = LMI.parse(RawRequest(orjson.dumps(body), {}), model)
    assert (call.encoder.content_type, call.requests[0].prompt) == (content_type, "a wolf")


@pytest.mark.usefixtures("clean_imports")
def test_the_formatters_of_a_models_own_come_first(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = """
        from djl_python.input_parser import input_formatter

        @input_formatter
        def read(payload: dict, **kwargs) -> dict:
            return {"inputs": payload["text"]}
    """
    model = replace(played_model(tokenizer), texts=lambda: Texts(tokenizer, None, load(tmp_path, source)))
    assert LMI.parse(RawRequest(b'{"text": "a wolf"}', {}), model).requests[0].prompt == "a wolf"


def test_an_endpoints_paths_are_those_of_sagemakers_runtime(tokenizer: Tokenizer) -> None:
    model, body = played_model(tokenizer), b'{"inputs": "a wolf", "stream": true}'
    variant = ("x-Amzn-Invoked-Production-Variant", "AllTraffic")
    headers = {"x-amzn-sagemaker-accept": "text/event-stream"}
    whole = LMI.parse(RawRequest(body, headers, "/endpoints/{endpoint}/invocations"), model)
    assert (whole.encoder.content_type, whole.headers) == ("application/jsonlines", (variant,))
    stream = LMI.parse(RawRequest(body, headers, "/endpoints/{endpoint}/invocations-response-stream"), model)
    assert stream.encoder.content_type == "application/vnd.amazon.eventstream"
    assert stream.headers == (("X-Amzn-SageMaker-Content-Type", "text/event-stream"), variant)
    assert LMI.parse(RawRequest(body, headers, "/invocations"), model).headers == ()


def test_errors_have_the_statuses_of_the_options() -> None:
    error = OverloadedError("full", queue_depth=1, capacity=1, retry_after=7)
    options = Options(throttle_error_http_code=529)
    found = LMI.encode_error(error, options)
    assert found.status == 529 and found == encode_error(error, options)


def test_its_paths_are_described() -> None:
    check_descriptions(LMI)

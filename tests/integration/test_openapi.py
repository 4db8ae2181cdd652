"""schemathesis sends what the description allows, and what it does not, to every operation of the server.

OPENAPI_EXAMPLES is how many requests of either kind the slow test sends to each operation: 1000 takes hours.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from djl_trtllm.api.parameters import NOT_GIVEN
from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.server.description import OPERATIONS
from tests.support.client import JSON

schemathesis = pytest.importorskip("schemathesis")

QUICK = 12
EXAMPLES = int(os.environ.get("OPENAPI_EXAMPLES", "100"))

ALL = [
    *OPERATIONS,
    *(("post", path) for dialect in DIALECTS for path in (*dialect.paths, *dialect.actions)),
    *(("get", path) for dialect in DIALECTS for path in dialect.pages),
]
# Other paths of the same tables, of SageMaker's for one, are read by the same code.
DIFFERENT = [
    *OPERATIONS,
    *{
        (type(dialect), dialect.tables.get(path) or path): ("post", path)
        for dialect in DIALECTS
        for path in reversed((*dialect.paths, *dialect.actions))
    }.values(),
]
POSTED = [path for dialect in DIALECTS for path in (*dialect.paths, *dialect.actions)]
NAMES = {"model": ["story", "hen"], "version": ["1"]}

NOT_JSON = [
    b"",
    b"{",
    b"nul",
    b'{"a": NaN}',
    b"\xff\xfe",
    b'"\\ud800"',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"1" * 100_000,
]
NOT_OBJECTS = [b"null", b"[]", b"1e5", b'"text"', b"[" * 900 + b"]" * 900]
STRANGE: list[bytes] = [
    b"[" * 900 + b"]" * 900,
    b'{"a":' * 900 + b"1" + b"}" * 900,
    b"9" * 400,
    b"18446744073709551615",
    b"-9223372036854775808",
    b"1e308",
    b"-0.0",
    b'"' + b"a" * 100_000 + b'"',
    b'"\\u0000"',
    b"[" + b"1," * 50_000 + b"1]",
    b'{"type": {}, "value": []}',
    b'{"type": "json", "value": ' + b'{"a":' * 300 + b"1" + b"}" * 301,
]
"""Values for every parameter in turn."""


@pytest.fixture(scope="module")
def described(address: str) -> Any:
    return httpx.get(f"{address}/openapi.json", trust_env=False).json()


@pytest.fixture(scope="module")
def schema(described: Any) -> Any:
    described = copy.deepcopy(described)
    for methods in described["paths"].values():
        for operation in methods.values():
            for parameter in operation.get("parameters", []):
                if parameter["name"] in NAMES:
                    parameter["schema"] = {"enum": NAMES[parameter["name"]]}
            # Otherwise nearly every request would name no model.
            operation["parameters"] = [
                parameter for parameter in operation.get("parameters", []) if parameter["name"] != "model_name"
            ]
    checks = {"negative_data_rejection": {"expected-statuses": ["4xx"]}}
    config = schemathesis.Config.from_dict({"checks": checks})
    loaded = schemathesis.openapi.from_dict(described, config=config)
    return loaded


def check(schema: Any, address: str, method: str, path: str, count: int) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    wanted = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
        checks.unsupported_method,
    ]
    session = requests.Session()
    session.trust_env = False
    operation = schema[path][method.upper()]
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

        @settings(max_examples=count, suppress_health_check=list(HealthCheck), deadline=None, database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Any) -> None:
            # Requests would end the path at a question mark that schemathesis leaves in it.
            if any("?" in str(value) for value in case.path_parameters.values()):
                return
            case.call_and_validate(address, session=session, checks=wanted, timeout=120)

        try:
            one()
        except Unsatisfiable:
            # Nothing that the operation takes can be wrong.
            assert mode is GenerationMode.NEGATIVE


@pytest.mark.parametrize(("method", "path"), ALL)
def test_an_operation_does_what_its_description_says(schema: Any, address: str, method: str, path: str) -> None:
    check(schema, address, method, path, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), DIFFERENT)
def test_an_operation_always_does_what_its_description_says(schema: Any, address: str, method: str, path: str) -> None:
    check(schema, address, method, path, EXAMPLES)


def url(address: str, path: str) -> str:
    return address + re.sub(r"\{\w+\}", "story", path.replace("{version}", "1"))


def refusal(client: httpx.Client, address: str, path: str, body: bytes) -> httpx.Response:
    answer = client.post(url(address, path), content=body, headers=JSON, timeout=30)
    assert 400 <= answer.status_code < 500, (path, body[:60], answer.status_code, answer.text[:200])
    return answer


@pytest.mark.parametrize("path", POSTED)
def test_a_body_that_is_not_json_gets_the_dialects_own_error(address: str, described: Any, path: str) -> None:
    with httpx.Client(trust_env=False) as client:
        for body in (*NOT_JSON, *NOT_OBJECTS):
            if path == "/v2/repository/index" and not body:
                continue  # it may be left out
            answer = refusal(client, address, path, body)
            assert str(answer.status_code) in described["paths"][path]["post"]["responses"]


@pytest.mark.parametrize("path", POSTED)
def test_no_value_of_a_parameter_is_a_defect_of_the_server(address: str, path: str) -> None:
    (dialect,) = (dialect for dialect in DIALECTS if path in (*dialect.paths, *dialect.actions))
    with httpx.Client(trust_env=False) as client:
        for table in dialect.tables.get(path, ()):
            properties = table.schema()["properties"]
            for body in bodies(properties, table.schema().get("required", [])):
                answer = client.post(url(address, path), content=body, headers=JSON, timeout=30)
                assert answer.status_code < 500, (body[:100], answer.status_code, answer.text[:200])
                assert "see the server's log" not in answer.text, body[:100]


def bodies(properties: dict[str, Any], required: list[str]) -> Iterator[bytes]:
    """A body for each parameter, also of objects within, and each strange value."""
    members = {name: VALID.get(name, b'"the wolf"') for name in required}
    for name, schema in properties.items():
        for value in STRANGE:
            yield dumped({**members, name: value})
        for inner in schema.get("anyOf", [schema]):
            if inner.get("additionalProperties") in (False, NOT_GIVEN) and "properties" in inner:
                for body in bodies(inner["properties"], []):
                    yield dumped({**members, name: body})


VALID = {"messages": b'[{"role": "user", "content": "the wolf"}]', "tokens": b"[5]"}


def dumped(members: dict[str, bytes]) -> bytes:
    return b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in members.items()) + b"}"

"""schemathesis sends what the description allows, and what it does not, to every operation of the server.

OPENAPI_EXAMPLES is how many requests of either kind the slow test sends to each operation: 1000 takes hours.
"""

from __future__ import annotations

import copy
import os
import re
from typing import Any

import httpx
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.server.routes import OPERATIONS

schemathesis = pytest.importorskip("schemathesis")

QUICK = 4
EXAMPLES = int(os.environ.get("OPENAPI_EXAMPLES", "40"))

OWN = [(method.lower(), path) for method, path in map(str.split, OPERATIONS)]
# Other paths of the same tables, of SageMaker's for one, are read by the same code.
DIFFERENT = [
    *OWN,
    *(("get", path) for dialect in DIALECTS for path in dialect.pages),
    *{
        (type(dialect), dialect.tables.get(path) or path): ("post", path)
        for dialect in DIALECTS
        for path in reversed((*dialect.paths, *dialect.actions))
    }.values(),
]
NAMES = {"model": ["story", "hen"], "version": ["1"]}
# A path with a part that may be any text takes a hundred times as long to generate.
NAMED = [(method, path) for method, path in DIFFERENT if set(re.findall(r"{(\w+)}", path)) <= set(NAMES)]


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


@pytest.mark.parametrize(("method", "path"), NAMED)
def test_an_operation_does_what_its_description_says(schema: Any, address: str, method: str, path: str) -> None:
    check(schema, address, method, path, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), DIFFERENT)
def test_an_operation_always_does_what_its_description_says(schema: Any, address: str, method: str, path: str) -> None:
    check(schema, address, method, path, EXAMPLES)

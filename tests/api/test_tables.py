"""The tables of parameters, and what dialects say of their paths, as stored in `golden/`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from djl_trtllm import errors
from djl_trtllm.api.base import Dialect, Operation, RawRequest
from djl_trtllm.api.chat import TOOLS
from djl_trtllm.api.dialects import embeddings, messages, rerank, responses as answers, tgi, truss
from djl_trtllm.api.dialects.lmi.dialect import INPUTS_FIELDS, INPUTS_PARAMETERS, VECTOR_FIELDS
from djl_trtllm.api.dialects.openai import dialect as openai
from djl_trtllm.api.dialects.triton.inference import ENSEMBLE, LLM_API, NOT_PRODUCED
from djl_trtllm.api.openapi import (
    INTEGER,
    NULL,
    STRING,
    any_of,
    describe,
    document,
    joined,
    members,
    request_errors,
    resolved,
    schema_of,
)
from djl_trtllm.api.parameters import TEXT, Parameter, Problems, Table, integer
from djl_trtllm.api.registry import DEFAULT, DIALECTS
from djl_trtllm.api.sampling import ADAPTER, NOT_HONOURED, SAMPLING, read_sampling
from djl_trtllm.config import Options
from djl_trtllm.errors import RequestError
from djl_trtllm.request import Sampling
from tests.api.models import PlayedModel, check_descriptions, check_golden, check_rows, check_tables
from tests.support.plugin import TRIAL, Trial
from tests.support.tables import by_rows, by_table

TABLES: dict[str, dict[str, Table]] = {
    "lmi": {
        "inputs": INPUTS_FIELDS,
        "parameters": INPUTS_PARAMETERS,
        "vectors": VECTOR_FIELDS,
    },
    "openai": {
        "chat": openai.CHAT_FIELDS,
        "completion": openai.COMPLETION_FIELDS,
        "stream_options": openai.STREAM_OPTIONS,
        "tokenize": openai.TOKENIZE_FIELDS,
        "detokenize": openai.DETOKENIZE_FIELDS,
    },
    "messages": {
        "message": messages.FIELDS,
        "count": messages.COUNT_FIELDS,
        "output_config": messages.OUTPUT_CONFIG,
    },
    "responses": {"response": answers.FIELDS, "text": answers.TEXT, "reasoning": answers.REASONING},
    "embeddings": {"fields": embeddings.FIELDS},
    "rerank": {"documents": rerank.RERANK_FIELDS, "texts": rerank.TEXTS_FIELDS, "score": rerank.SCORE_FIELDS},
    "tei": {"fields": embeddings.TEI_FIELDS},
    "tgi": {"fields": tgi.FIELDS, "parameters": tgi.PARAMETERS},
    "triton": {"fields": ENSEMBLE.fields, "llm-api": LLM_API.fields},
    "truss": {"fields": truss.FIELDS},
}


@by_rows("dialect", DIALECTS)
def test_a_dialect_reads_its_examples_and_its_tables_are_as_stored(dialect: Dialect) -> None:
    for path in dialect.paths:
        request = RawRequest(orjson.dumps(describe(dialect, path).example), {}, path, {"model": "ensemble"})
        if describe(dialect, path).example is not None:
            assert dialect.parse(request, PlayedModel()).requests
    name = type(dialect).__name__.lower()
    check_tables(name, **TABLES[name])
    check_descriptions(dialect)


def test_the_rows_of_several_tables_are_as_stored() -> None:
    assert read_sampling({}, Problems()) == Sampling()
    check_rows("shared", (*SAMPLING, *ADAPTER, *NOT_HONOURED))
    check_rows("openai-tools", TOOLS)


def test_the_page_names_what_is_honoured() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    # `min_tokens` and `adapter_id` are vLLM's and TGI's names of what the page names as documented.
    honoured = {name for name, row in INPUTS_PARAMETERS.rows.items() if row.target}
    assert honoured - named == {"min_tokens", "adapter_id"}


def test_tritons_inputs_and_outputs_are_as_stored() -> None:
    for prefix, interface, count in (("triton", ENSEMBLE, 44), ("triton-llm-api", LLM_API, 23)):
        inputs = [f"{each.name} {each.datatype} {each.dims}{' optional' * each.optional}" for each in interface.inputs]
        check_golden(f"{prefix}-inputs", ("\n".join(inputs) + "\n").encode())
        outputs = [f"{each.name} {each.datatype} {each.dims}" for each in interface.outputs]
        check_golden(f"{prefix}-outputs", "\n".join([*outputs, "not produced:", *sorted(NOT_PRODUCED), ""]).encode())
        assert len({each.name for each in interface.inputs}) == count == len(interface.inputs)


def test_any_input_of_tritons_generate_may_be_in_a_list() -> None:
    schema, fields = ENSEMBLE.schema(), ENSEMBLE.fields
    assert schema["properties"].keys() == {*fields.rows, "id", "parameters"}
    assert schema["properties"]["top_k"]["anyOf"] == [fields.schema()["properties"]["top_k"], {"type": "array"}]
    assert schema["properties"]["id"] == {}


@by_table("value", "schema")
def test_the_schema_of_a_value(value: object, schema: object) -> None:
    assert schema_of(value) == schema


def test_joined_objects_have_the_members_of_both_and_require_those_that_both_have() -> None:
    one, other = schema_of({"a": 1, "b": None}), schema_of({"b": "x", "c": 1})
    assert joined(one, other) == {
        "type": "object",
        "properties": {"a": INTEGER, "b": any_of(NULL, STRING), "c": INTEGER},
        "required": ["b"],
        "additionalProperties": False,
    }
    assert joined(one, one) == one
    assert members({"a": STRING}, optional={"b": INTEGER})["required"] == ["a"]


def test_other_schemas_become_alternatives() -> None:
    assert joined(STRING, NULL) == {"anyOf": [STRING, NULL]}
    assert joined(any_of(STRING, NULL), any_of(NULL, INTEGER)) == {"anyOf": [STRING, NULL, INTEGER]}
    assert joined(members({}), STRING) == {"anyOf": [members({}), STRING]}


class Described(Trial):
    """A dialect with tables."""

    tables = MappingProxyType(
        {"/trial": (Table((Parameter(("a", "b"), integer(1, 5), "a"),)), Table((Parameter(("c",), TEXT, "c"),)))}
    )
    descriptions = MappingProxyType(
        {
            "/trial": Operation("Try", {"text/plain": {}}, {"text/lines": STRING}, {"deep": STRING}, {"a": 1}),
            "GET /trial/models": Operation("The models", responses={"text/lines": STRING}, errors={503: "Not yet"}),
        }
    )


def described(
    *dialects: Dialect, own: Mapping[str, Operation] = MappingProxyType({}), **options: Any
) -> dict[str, Any]:
    return document(dialects, own, Options(**options), DEFAULT)


def references(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in a description that has a reference."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_path_of_every_dialect_is_described() -> None:
    made = described(*DIALECTS, TRIAL)
    assert all(dialect.title for dialect in DIALECTS)
    titles = {dialect: dialect.title or type(dialect).__name__ for dialect in (*DIALECTS, TRIAL)}
    for dialect in titles:
        for path in (*dialect.paths, *dialect.actions):
            assert made["paths"][path]["post"]["tags"] == [titles[dialect]]
        for path in dialect.pages:
            assert made["paths"][path]["get"]["tags"] == [titles[dialect]]
    assert [tag["name"] for tag in made["tags"]] == ["Server", *titles.values()]
    assert (made["openapi"], made["info"]["title"]) == ("3.1.0", "djl-trtllm")


def test_operations_have_names_of_their_own_and_references_lead_somewhere() -> None:
    made = described(*DIALECTS, TRIAL)
    names = [each["operationId"] for methods in made["paths"].values() for each in methods.values()]
    assert len(set(names)) == len(names)
    found = list(references(made))
    assert found
    assert all(resolved(made, each) for each in found)
    assert resolved(made, {"a": 1}) == {"a": 1}


@by_rows("dialect", DIALECTS)
def test_every_body_of_a_dialect_has_its_members_and_its_paths_have_summaries(dialect: Dialect) -> None:
    for path in (*dialect.paths, *dialect.actions):
        operation = describe(dialect, path)
        assert operation.summary
        for kind, schema in operation.bodies.items():
            for each in schema.get("anyOf", [schema]) if kind == "application/json" else ():
                assert each["properties"], path
    others = [("GET", path) for path in dialect.pages] + [("DELETE", path) for path in dialect.removals]
    assert all(describe(dialect, path, method).summary for method, path in others)


def test_a_dialect_that_says_nothing_has_a_description() -> None:
    made = described(TRIAL)
    operation = made["paths"]["/trial/{model}/stream"]["post"]
    assert operation["requestBody"] == {"content": {"*/*": {}}, "required": False}
    assert operation["responses"]["200"] == {"description": "OK", "content": {"*/*": {}}}
    (model,) = operation["parameters"]
    assert (model["name"], model["in"], model["required"]) == ("model", "path", True)
    assert "requestBody" not in made["paths"]["/trial/models"]["get"]
    assert resolved(made, operation["responses"]["429"])["content"] == {"text/plain": {"schema": STRING}}


def test_a_body_is_that_of_the_tables() -> None:
    made = described(Described())
    operation = made["paths"]["/trial"]["post"]
    content = operation["requestBody"]["content"]
    assert operation["requestBody"]["required"] is True
    assert content["text/plain"] == {}
    assert content["application/json"]["example"] == {"a": 1}
    one, other = resolved(made, content["application/json"]["schema"])["anyOf"]
    assert (list(one["properties"]), list(other["properties"])) == (["a", "b"], ["c"])
    assert operation["summary"] == "Try"
    assert operation["responses"]["200"]["content"] == {"text/lines": {"schema": STRING}}
    assert [each["name"] for each in operation["parameters"]] == ["deep", "model_name"]


def test_what_a_page_says_of_a_status_is_in_the_place_of_the_errors() -> None:
    responses = described(Described())["paths"]["/trial/models"]["get"]["responses"]
    assert responses["503"]["description"] == "Not yet"
    # Of errors, a page has those of finding a model, and defects.
    assert sorted(responses) == ["200", "404", "500", "503"]


def test_errors_are_those_that_the_dialect_makes() -> None:
    made = described(DEFAULT, throttle_error_http_code=499)
    responses = made["paths"]["/invocations"]["post"]["responses"]
    assert sorted(responses) == ["200", "400", "401", "403", "404", "413", "424", "429", "499", "500", "503"]
    overloaded = resolved(made, responses["499"])
    assert overloaded["description"] == "The request queue is full"
    assert list(overloaded["headers"]) == ["Retry-After"]
    schema = overloaded["content"]["application/json"]["schema"]
    assert sorted(schema["required"]) == ["code", "message", "queue_capacity", "queue_depth", "type"]
    assert "is malformed" in resolved(made, responses["424"])["description"]
    made = described(DEFAULT)
    unavailable = resolved(made, made["paths"]["/invocations"]["post"]["responses"]["503"])
    schema = unavailable["content"]["application/json"]["schema"]
    assert sorted(schema["required"]) == ["code", "message", "type"], "not every such error has the queue's length"
    assert sorted(schema["properties"]) == ["code", "message", "queue_capacity", "queue_depth", "type"]


def test_errors_of_sagemakers_path_are_sagemakers() -> None:
    made = described(DEFAULT)
    responses = made["paths"]["/endpoints/{endpoint}/invocations"]["post"]["responses"]
    assert sorted(responses) == ["200", "400", "424"]
    schema = resolved(made, responses["424"])["content"]["application/json"]["schema"]
    assert schema["required"] == ["Message", "OriginalMessage", "OriginalStatusCode"]


def test_own_paths_have_the_errors_of_defects() -> None:
    operation = Operation("Look", responses={"application/json": members({"a": STRING})}, errors={409: "Taken"})
    made = described(own={"PUT /own/{name}": operation})
    own = made["paths"]["/own/{name}"]["put"]
    assert (own["operationId"], own["tags"], own["summary"]) == ("Server_put_own_name", ["Server"], "Look")
    assert list(own["responses"]) == ["200", "409", "500"]
    assert resolved(made, own["responses"]["500"])["description"] == "A defect of the server"
    assert own["responses"]["409"] == {"description": "Taken", "content": {"application/json": {}}}
    assert list(own["responses"]["200"]["content"]) == ["application/json"]
    bare = described(own={"GET /own": Operation("Look", responses={})})["paths"]["/own"]["get"]
    assert bare["responses"]["200"] == {"description": "OK"}


def test_there_is_an_error_of_every_class() -> None:
    classes = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)} - {
        RequestError
    }
    assert {type(error) for error in request_errors()} == classes


def test_of_components_with_one_name_the_later_ones_are_numbered() -> None:
    components = described(DEFAULT)["components"]["responses"]
    assert {"Lmi_424", "Lmi_424_2", "Lmi_413"} <= components.keys()
    assert not {"Lmi_413_2", "Lmi_424_3"} & components.keys()

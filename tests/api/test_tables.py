"""The tables of parameters, and what dialects say of their paths, as stored in `golden/`."""

from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest

from djl_trtllm.api import Dialect, RawRequest
from djl_trtllm.api.chat import TOOLS
from djl_trtllm.api.dialects import embeddings, messages, rerank, tei, tgi, truss
from djl_trtllm.api.dialects import responses as answers
from djl_trtllm.api.dialects.lmi.dialect import BESIDE_FIELDS, INPUTS_FIELDS, INPUTS_PARAMETERS, VECTOR_FIELDS
from djl_trtllm.api.dialects.openai import dialect as openai
from djl_trtllm.api.dialects.triton.inference import (
    BLS_INPUTS,
    FIELDS,
    GENERATE_FIELDS,
    INPUTS,
    NOT_PRODUCED,
    OUTPUTS,
)
from djl_trtllm.api.openapi import describe
from djl_trtllm.api.parameters import Problems, Table
from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.api.sampling import ADAPTER, NOT_HONOURED, SAMPLING, read_sampling
from djl_trtllm.request import Sampling
from tests.api.models import PlayedModel
from tests.api.scripts import check_golden
from tests.api.tables import check_descriptions, check_rows, check_tables

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
    "tei": {"fields": tei.FIELDS},
    "tgi": {"fields": tgi.FIELDS, "parameters": tgi.PARAMETERS},
    "triton": {"fields": FIELDS},
    "truss": {"fields": truss.FIELDS},
}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: type(dialect).__name__)
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


def test_every_sampling_parameter_is_known_in_chat() -> None:
    shown = {"details", "return_full_text", "decoder_input_details"}
    assert set(INPUTS_PARAMETERS.rows) - shown <= set(openai.CHAT_FIELDS.rows) | set(BESIDE_FIELDS.rows)


def test_the_page_names_what_is_honoured() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    # `min_tokens` and `adapter_id` are vLLM's and TGI's names of what the page names as documented.
    honoured = {name for name, row in INPUTS_PARAMETERS.rows.items() if row.target}
    assert honoured - named == {"min_tokens", "adapter_id"}


def test_tritons_inputs_and_outputs_are_as_stored() -> None:
    inputs = [
        f"{each.name} {each.datatype} {each.dims}{' optional' * each.optional}" for each in (*INPUTS, *BLS_INPUTS)
    ]
    check_golden("triton-inputs", ("\n".join(inputs) + "\n").encode())
    outputs = [f"{each.name} {each.datatype} {each.dims}" for each in OUTPUTS]
    check_golden("triton-outputs", "\n".join([*outputs, "not produced:", *sorted(NOT_PRODUCED), ""]).encode())
    assert (len(INPUTS), len({each.name for each in (*INPUTS, *BLS_INPUTS)})) == (34, 40)


def test_any_input_of_tritons_generate_may_be_in_a_list() -> None:
    schema = GENERATE_FIELDS.schema()
    assert schema["properties"].keys() == {*FIELDS.rows, "id", "parameters"}
    assert schema["properties"]["top_k"]["anyOf"] == [FIELDS.schema()["properties"]["top_k"], {"type": "array"}]
    assert schema["properties"]["id"] == {}

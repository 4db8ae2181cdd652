"""A model in figures."""

from __future__ import annotations

from djl_trtllm.executor.protocol import Stats
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.model_figures import ModelFigures
from djl_trtllm.service import ServedModel
from tests.server.metric_pages import set_stats
from tests.support.in_process import Hosts, ask, played_model
from tests.support.virtual_time import in_virtual_time


async def story(tokenizer: Tokenizer, workers: int = 1, **script: object) -> ServedModel:
    model = ServedModel("story", "/story")
    await model.load(
        lambda: played_model(tokenizer, script=script, max_rolling_batch_size=2, job_queue_size=7), workers
    )
    return model


def test_before_it_is_loaded_nothing_is_known_of_an_engine() -> None:
    found = ModelFigures.of(ServedModel("story", "/story"))
    assert (found.name, found.engine, found.ready, found.workers, found.restarts) == ("story", None, False, 1, 0)
    assert (found.waiting, found.running) == (0, 0)
    assert (found.max_running, found.max_waiting, found.memory) == (None, None, None)
    assert (found.kv_usage, found.kv_blocks, found.kv_blocks_used, found.kv_block_tokens) == (None,) * 4
    assert (found.queued, found.paused, found.iterations, found.iteration_seconds) == (None,) * 4


@in_virtual_time
async def test_workers_add_up_and_of_ratios_the_largest_counts(hosts: Hosts, tokenizer: Tokenizer) -> None:
    model = await story(tokenizer, 2)
    for _ in range(3):
        await ask(model.workers[0])
    set_stats(model.workers[0], Stats(1, 0.25, 22, 13, 24, 1.5, 60, 15, 0.75))
    set_stats(model.workers[1], Stats(1, 0.5, 12, 23, 14, 2.5, 40, 20, 0.5))
    found = ModelFigures.of(model)
    assert (found.engine, found.ready, found.workers, found.running, found.waiting) == ("scripted", True, 2, 2, 1)
    assert (found.max_running, found.max_waiting) == (4, 14)
    assert (found.kv_usage, found.kv_blocks, found.kv_blocks_used, found.kv_hit_rate) == (0.5, 100, 35, 0.75)
    assert (found.queued, found.paused, found.iterations, found.iteration_seconds) == (34, 36, 24, 2.5)
    assert found.kv_block_tokens == 32
    await model.close()


@in_virtual_time
async def test_an_engine_whose_cache_is_known_has_used_nothing_before_its_first_request(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    model = await story(tokenizer, kv_blocks=90, block_size=16)
    found = ModelFigures.of(model)
    assert (found.kv_usage, found.kv_blocks, found.kv_blocks_used, found.kv_block_tokens) == (0, 90, 0, 16)
    await model.close()


@in_virtual_time
async def test_what_an_engine_does_not_report_is_unknown(hosts: Hosts, tokenizer: Tokenizer) -> None:
    model = await story(tokenizer)
    found = ModelFigures.of(model)
    assert (found.kv_usage, found.kv_blocks, found.kv_block_tokens, found.iterations) == (None, None, None, None)
    set_stats(model.workers[0], Stats(0, 0.0, 0, 0, 0, 0.0))
    found = ModelFigures.of(model)
    assert (found.kv_usage, found.queued, found.iteration_seconds) == (0, 0, 0)
    await model.close()

"""The predicted speed: how near it is to published ones, what always holds of it, and the file of measured points."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import Conditions
from djl_trtllm.sizing.machines import GPUS, GpuModel, usd_per_million
from djl_trtllm.sizing.points import FILE_NAME, Point, fingerprint, precision_of, read_points, write_point
from djl_trtllm.sizing.speed import CONSTANTS, Load, Rank, Roofline, Speed, corrected
from tests.commands.conftest import BIG
from tests.sizing.configs import CONFIGS, deepseek, gemma3, gpt_oss, llama, nemotron_h
from tests.support.tables import by_rows, by_table
from tools.sizing.check_speed import Row, constants_now, cost, halves, rows, summary

LOAD = Load(1000, 1000, 64)
PLENTY = 10**6


def roofline(
    config: dict[str, Any] | None = None, gpu: str | GpuModel = "H100", engine: str = "tensorrt", **conditions: Any
) -> Roofline:
    model = GPUS[gpu] if isinstance(gpu, str) else gpu
    rank = Rank(CheckpointSizes.from_config(config or llama()), Conditions(model.memory, **conditions), model)
    return Roofline(rank, CONSTANTS[engine])


def speed(load: Load = LOAD, room: int = PLENTY, **of: Any) -> Speed:
    return roofline(**of).speed(load, room)


# -- published speeds --


def _near(checked: list[Row], share: float) -> float:
    return sum(abs(row.ratio() - 1) <= share for row in checked) / len(checked)


@pytest.mark.parametrize("half", [0, 1], ids=["fitted", "held-out"])
def test_most_published_decode_speeds_are_predicted_within_25_percent(half: int) -> None:
    decode = [row for row in halves()[half] if row.decode]
    assert len(decode) > 200
    assert _near(decode, 0.25) >= 0.85
    for gpu in {row.gpu for row in decode}:
        assert _near([row for row in decode if row.gpu == gpu], 0.25) >= 0.7, gpu


def test_our_own_measurements_of_vllm_are_predicted_without_a_fit_to_them() -> None:
    ours = [row for row in rows() if row.source == "docs/performance.md"]
    assert {(row.model[:2], row.batch) for row in ours} == {("1b", 1), ("1b", 64), ("1b", 256), ("8b", 256)}
    assert not {str(row) for row in ours} & {str(row) for half in halves() for row in half}
    assert _near(ours, 0.3) == 1


def test_the_halves_are_apart_and_have_all_rows_that_are_fitted_to() -> None:
    fitted, held_out = halves()
    assert abs(len(fitted) - len(held_out)) <= 1
    assert len({id(row) for row in (*fitted, *held_out)}) == sum(not row.unfitted for row in rows())


def test_the_constants_are_what_the_fit_finds() -> None:
    sample = [row for row in halves()[0] if row.engine != "vllm"]
    least = cost(sample, constants_now())
    for name, value in constants_now().items():
        for by in (0.8, 1.25):
            assert cost(sample, constants_now() | {name: value * by}) > least, (name, by)


def test_the_page_has_the_table_as_it_is_printed() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text(encoding="utf-8")
    assert "\n".join(summary()).strip() in page


@by_table("model", "changes", "gpu", "engine", "conditions", "load", "found")
def test_a_prediction_changes_on_purpose_only(
    model: str, changes: dict[str, Any], gpu: str, engine: str, conditions: dict[str, Any], load: list[int], found: Any
) -> None:
    """`load` ends with the room; `found` are tokens per second, and the seconds of first tokens and intervals."""
    one = speed(Load(*load[:3]), load[3], config=CONFIGS[model] | changes, gpu=gpu, engine=engine, **conditions)
    numbers = [one.tokens_per_second, one.ttft_seconds, one.ttft_of_burst_seconds, one.itl_seconds]
    assert numbers == pytest.approx(found, rel=1e-7)


# -- what always holds --


@by_rows("config", [llama(), deepseek(), gemma3(), gpt_oss(), nemotron_h()])
@by_rows("engine", CONSTANTS)
def test_more_clients_get_more_together_and_less_each(config: dict[str, Any], engine: str) -> None:
    found = [speed(replace(LOAD, clients=clients), config=config, engine=engine) for clients in (1, 4, 16, 64, 256)]
    assert sorted(one.tokens_per_second for one in found) == [one.tokens_per_second for one in found]
    assert sorted((one.per_stream for one in found), reverse=True) == [one.per_stream for one in found]
    assert sorted(one.ttft_seconds for one in found) == [one.ttft_seconds for one in found]


@pytest.mark.parametrize("name", ["bandwidth", "link", "bf16", "fp8"])
def test_a_better_gpu_is_not_slower(name: str) -> None:
    gpu = GPUS["H100"]
    flops = dict(gpu.flops)
    if name in flops:
        better = replace(gpu, flops={**flops, name: 2 * flops[name]})
    else:
        better = replace(gpu, **{name: 2 * getattr(gpu, name)})
    one, other = (speed(gpu=each, tensor_parallel=2, quantization="fp8") for each in (better, gpu))
    assert one.tokens_per_second > other.tokens_per_second


@by_rows(
    ("faster", "slower"),
    [
        ({"quantization": "fp8"}, {}),
        ({"quantization": "awq", "load": Load(100, 100)}, {"load": Load(100, 100)}),
        ({"tensor_parallel": 4, "load": Load(100, 100)}, {"load": Load(100, 100)}),
        ({"kv_dtype": "fp8"}, {}),
        ({"config": gemma3()}, {"config": gemma3(sliding_window=100_000)}),
        ({"load": Load(500, 1000, 64)}, {}),
        ({"engine": "vllm", "load": Load(100, 1000, 2000)}, {"engine": "pytorch", "load": Load(100, 1000, 2000)}),
        ({"gpu": "B200"}, {"gpu": "H200"}),
        ({"config": gpt_oss() | {"num_experts_per_tok": 2}}, {"config": gpt_oss()}),
        ({"pipeline_parallel": 2}, {}),
    ],
)
def test_less_to_read_or_to_multiply_is_faster(faster: dict[str, Any], slower: dict[str, Any]) -> None:
    assert speed(**faster).tokens_per_second > speed(**slower).tokens_per_second


def test_weights_in_four_bits_are_read_faster_and_multiplied_in_sixteen() -> None:
    prompts = Load(4000, 1, 100)
    assert speed(Load(10, 100), quantization="awq").itl_seconds < 0.6 * speed(Load(10, 100)).itl_seconds
    assert speed(prompts, quantization="awq").ttft_seconds == pytest.approx(speed(prompts).ttft_seconds, rel=0.02)


def test_a_gpu_without_fp8_reads_less_but_multiplies_in_sixteen_bits() -> None:
    prompts = Load(4000, 1, 1)
    for gpu, gains in (("A100", False), ("L40S", True)):
        name = "A100-80GB" if gpu == "A100" else gpu
        gain = speed(prompts, gpu=name).ttft_seconds / speed(prompts, gpu=name, quantization="fp8").ttft_seconds
        assert (gain > 1.3) is gains, gpu


def test_the_times_of_a_request_add_up_to_its_share_of_the_tokens() -> None:
    found = speed()
    lasts = found.ttft_seconds + (LOAD.osl - 1) * found.itl_seconds
    assert found.tokens_per_second == pytest.approx(LOAD.clients * LOAD.osl / lasts)
    assert found.ttft_seconds < found.ttft_of_burst_seconds
    assert usd_per_million(3.6, found.tokens_per_second) == pytest.approx(1000 / found.tokens_per_second)


def test_clients_without_room_wait_and_add_nothing() -> None:
    some, all_ = speed(room=16), speed(replace(LOAD, clients=16))
    assert (some.running, some.tokens_per_second) == (16, all_.tokens_per_second)
    wave = all_.ttft_seconds + (LOAD.osl - 1) * all_.itl_seconds
    assert some.ttft_seconds - all_.ttft_seconds == pytest.approx(3 * wave)
    assert speed(room=1).running == 1
    with pytest.raises(SizingError, match="no sequence of 2000 tokens fits"):
        speed(room=0)


@pytest.mark.parametrize(("clients", "seconds"), [(1, 0.40677), (5, 0.5467), (25, 0.68869), (50, 0.83451)])
def test_published_times_to_the_first_token_are_predicted(clients: int, seconds: float) -> None:
    """NVIDIA NIM 1.8, Llama 3.3 70B in fp8 on two H100: first tokens of the rows in tools/sizing/speeds.toml."""
    of: dict[str, Any] = {"quantization": "fp8", "tensor_parallel": 2, "config": llama(**BIG)}
    assert speed(Load(5000, 500, clients), **of).ttft_seconds == pytest.approx(seconds, rel=0.15)


def test_a_single_client_has_no_neighbours_to_wait_for() -> None:
    alone = speed(Load(LOAD.isl, LOAD.osl))
    assert alone.load.clients == 1
    assert alone.ttft_seconds == alone.ttft_of_burst_seconds


def test_the_last_of_a_burst_waits_for_whole_waves() -> None:
    fitting = speed(replace(LOAD, clients=48))
    wave = fitting.ttft_seconds + (LOAD.osl - 1) * fitting.itl_seconds
    assert speed(room=48).ttft_of_burst_seconds == pytest.approx(fitting.ttft_of_burst_seconds + wave)


def test_what_the_largest_part_of_the_time_goes_to_is_named() -> None:
    # Prompts take less than half of the time here, and more than anything else.
    assert speed(Load(2048, 256, 64)).limit == "reading prompts"
    assert speed(Load(4000, 100, 64)).limit == "reading prompts"
    # Each stage of a pipeline reads its weights for its part of the sequences.
    assert speed(Load(2000, 200, 32), pipeline_parallel=2).limit == "reading the weights"
    assert speed(Load(10, 100, 1)).limit == "reading the weights"
    assert speed(Load(100, 100, 2), tensor_parallel=8).limit == "starting kernels and all-reduces"
    assert (
        speed(Load(10, 1000, 200), engine="pytorch", config=llama(num_hidden_layers=2)).limit == "the host's own work"
    )


def test_attention_in_a_prompt_looks_back_as_far_as_the_window() -> None:
    def first(window: int) -> float:
        return speed(Load(8000, 1, 1), config=gemma3(sliding_window=window)).ttft_seconds

    assert first(8000) == pytest.approx(first(100_000), rel=1e-4)
    quarter = (first(8000) - first(4000)) / (first(8000) - first(1))
    assert quarter == pytest.approx(0.25, abs=0.01)


def test_a_head_that_is_the_embedding_is_read_as_one_that_is_not() -> None:
    tied = speed(config=llama(tie_word_embeddings=True))
    assert tied.itl_seconds == pytest.approx(speed().itl_seconds)


def test_a_token_goes_to_all_experts_at_most_and_nothing_is_known_of_no_model() -> None:
    two, four = (llama(num_local_experts=2, num_experts_per_tok=number) for number in (2, 4))
    assert speed(config=four) == speed(config=two)
    none = Rank(CheckpointSizes.from_config({}), Conditions(1), GPUS["H100"])
    assert (none.layers, none.hidden, none.windows, none.state) == (0, 0, [], 0)
    for known in ({"num_attention_heads": 4}, {"head_dim": 4}):
        some = CheckpointSizes.from_config({"num_hidden_layers": 1} | known)
        assert [pair for _, pair, _ in Rank(some, Conditions(1), GPUS["H100"]).windows] == [0]


def test_one_output_token_has_no_interval() -> None:
    found = speed(Load(100, 1, 4))
    assert (found.itl_seconds, found.per_stream) == (0.0, float("inf"))


# -- measured points --

MEASURED = Point("0" * 16, "m", "vllm", "1", "H100", 1, "bfloat16", 1000, 1000, 64, 5000.0, "bench", "2026-11-27")


def _corrected(*points: Point, load: Load = LOAD) -> Speed:
    return corrected(roofline(), load, PLENTY, points)


def test_the_nearest_point_corrects_the_prediction_and_is_named() -> None:
    far = msgspec.structs.replace(MEASURED, clients=200, tokens_per_second=1.0)
    found = _corrected(far, MEASURED, msgspec.structs.replace(MEASURED, version="0", tokens_per_second=9.0))
    assert found.tokens_per_second == pytest.approx(5000)
    assert found.itl_seconds * found.tokens_per_second == pytest.approx(speed().itl_seconds * speed().tokens_per_second)
    assert found.corrected_by is not None
    assert "64 clients of 1000 + 1000 tokens" in found.corrected_by
    assert "bench, 2026-11-27" in found.corrected_by


def test_another_load_is_corrected_by_the_same_factor() -> None:
    load = replace(LOAD, clients=128)
    factor = 5000 / speed().tokens_per_second
    assert _corrected(MEASURED, load=load).tokens_per_second == pytest.approx(factor * speed(load).tokens_per_second)


def test_a_measured_time_to_the_first_token_corrects_that() -> None:
    found = _corrected(msgspec.structs.replace(MEASURED, ttft_p50=0.5))
    assert found.ttft_seconds == pytest.approx(0.5)
    assert found.tokens_per_second == pytest.approx(5000)


def test_a_point_counts_as_it_was_measured_though_less_fits_here() -> None:
    factor = 5000 / speed().tokens_per_second
    found = corrected(roofline(), LOAD, 32, [MEASURED])
    assert found.tokens_per_second == pytest.approx(factor * speed(room=32).tokens_per_second)
    assert found.ttft_of_burst_seconds / speed(room=32).ttft_of_burst_seconds == pytest.approx(1 / factor)


@by_rows("name", ["clients", "isl", "osl"])
@by_rows("by", [1 / 5, 5])
def test_points_of_another_load_by_far_do_not_count(name: str, by: float) -> None:
    far = msgspec.structs.replace(MEASURED, **{name: int(getattr(MEASURED, name) * by)})
    assert _corrected(far) == speed()
    assert _corrected() == speed()


# -- their file --------------------------------------------------------------------------------------------------------


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
WRITTEN = Point(
    model="0123456789abcdef",
    name="llama-8b",
    engine="vllm",
    version="0.26.0",
    gpu="H100",
    gpus=1,
    precision="bfloat16",
    isl=114,
    osl=256,
    clients=256,
    tokens_per_second=18681.0,
    ttft_p50=0.461,
    command="djl-trtllm bench",
    date="2026-11-26",
)


def _with(**values: object) -> Point:
    return msgspec.structs.replace(WRITTEN, **values)


def test_points_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert read_points(folder) == []
    write_point(folder, WRITTEN)
    write_point(folder, _with(clients=64, tokens_per_second=9000.5))
    assert [path.name for path in folder.iterdir()] == [FILE_NAME]
    assert read_points(folder) == [_with(clients=64, tokens_per_second=9000.5), WRITTEN]


def test_of_a_load_that_was_measured_again_the_last_point_counts(tmp_path: Path) -> None:
    again = _with(tokens_per_second=1.0, date="2026-11-27", command="again", ttft_p50=None)
    for point in (WRITTEN, _with(version="0.27.0"), again):
        write_point(tmp_path, point)
    load = Load(WRITTEN.isl, WRITTEN.osl, WRITTEN.clients)
    found = corrected(roofline(), load, load.clients, read_points(tmp_path))
    assert found.tokens_per_second == pytest.approx(1.0)


def test_a_user_may_edit_the_file(tmp_path: Path) -> None:
    write_point(tmp_path, WRITTEN)
    path = tmp_path / FILE_NAME
    path.write_bytes(b"\n\n" + path.read_bytes().replace(b"18681.0", b"5.5").strip())
    write_point(tmp_path, _with(clients=64))
    assert read_points(tmp_path) == [_with(clients=64), _with(tokens_per_second=5.5)]


def test_writers_at_the_same_moment_lose_no_point(tmp_path: Path) -> None:
    writers = [threading.Thread(target=write_point, args=(tmp_path, _with(clients=number + 1))) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(point.clients for point in read_points(tmp_path)) == list(range(1, 9))


@by_rows(
    "values",
    [
        {"tokens_per_second": 0.0},
        {"tokens_per_second": float("nan")},
        {"tokens_per_second": float("inf")},
        {"tokens_per_second": 1.5e9},
        {"clients": 0},
        {"clients": 2 * 10**7},
        {"gpu": ""},
        {"version": "v" * 101},
        {"command": "c" * 2001},
        {"name": "m" * 301},
        {"date": "yesterday"},
        {"ttft_p50": -1.0},
    ],
)
def test_a_point_out_of_bounds_is_refused_and_the_file_stays(tmp_path: Path, values: dict[str, object]) -> None:
    write_point(tmp_path, WRITTEN)
    with pytest.raises(SizingError, match=next(iter(values))):
        write_point(tmp_path, _with(**values))
    assert read_points(tmp_path) == [WRITTEN]


_ENTRY = msgspec.to_builtins(WRITTEN)


@by_rows(
    "content",
    [
        b"[]",
        b"{",
        b"{}",
        b"[" * 100_000,
        msgspec.json.encode(_ENTRY) + b"\n" + msgspec.json.encode(_ENTRY | {"clients": "many"}),
        msgspec.json.encode(_ENTRY | {"tokens_per_second": -1}),
        msgspec.json.encode(_ENTRY | {"other": 1}),
        b" " * (1 << 22),
    ],
)
def test_a_file_of_another_kind_is_an_error_that_names_it_and_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(content)
    for use in (lambda: read_points(tmp_path), lambda: write_point(tmp_path, WRITTEN)):
        with pytest.raises(SizingError, match=f"{path}.*delete that"):
            use()
    assert path.read_bytes() == content


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SizingError, match="engine_cache_dir"):
        write_point(tmp_path / "file", WRITTEN)


def test_a_fingerprint_is_of_the_sizes_that_decide_speed() -> None:
    def of(**values: object) -> str:
        return fingerprint(CheckpointSizes.from_config(LLAMA | values))

    assert of() == of(torch_dtype="float16") == of(model_type="mistral")
    others = ("num_hidden_layers", "hidden_size", "num_key_value_heads", "intermediate_size", "vocab_size")
    assert len({of(), *(of(**{name: LLAMA[name] // 2}) for name in others), of(sliding_window=4096)}) == 7
    # Points that users have recorded keep their model.
    kept = [fingerprint(CheckpointSizes.from_config(config)) for config in (nemotron_h(), deepseek())]
    assert kept == ["c01331bc1645c49b", "d348d20e6fc5c5c2"]


@pytest.mark.parametrize(
    ("stored", "quantization", "kv_dtype", "precision"),
    [
        ({}, None, None, "bfloat16"),
        ({}, "fp8", "auto", "fp8"),
        ({}, "fp8", "fp8", "fp8, kv fp8"),
        ({"quantization_config": {"quant_method": "fp8"}}, None, None, "fp8"),
    ],
)
def test_a_precision_is_of_what_is_stored_and_what_is_applied(
    stored: dict[str, object], quantization: str | None, kv_dtype: str | None, precision: str
) -> None:
    assert precision_of(CheckpointSizes.from_config(LLAMA | stored), quantization, kv_dtype) == precision

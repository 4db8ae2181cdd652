"""A predicted speed as lines for people and as JSON, for `djl-trtllm size --clients` and `djl-trtllm advise`."""

from typing import Any

from djl_trtllm.listing import number, seconds
from djl_trtllm.sizing.machines import PRICES, usd_per_million
from djl_trtllm.sizing.speed import Speed

HINT = "An estimate: docs/sizing.md says how far to trust it. djl-trtllm bench --record writes what a server measures."


def speed_lines(speed: Speed, hourly_price: float | None) -> list[str]:
    """Return the speed of one copy of the model; `hourly_price` is of the machine, in USD."""
    waiting = speed.load.clients - speed.running
    lines = [
        f"speed with {speed.load}: {number(speed.tokens_per_second)} output tokens per second in all, "
        f"{number(speed.per_stream)} of each stream; the largest part of the time goes to {speed.limit}",
        f"  first token after {seconds(speed.ttft)}, or {seconds(speed.ttft_of_burst)} for the last one if all send at "
        f"once; {seconds(speed.itl)} between two tokens",
    ]
    if waiting:
        lines.append(f"  {speed.running} run at a time, and {waiting} wait for room in the KV cache or the batch")
    if dollars := usd_per_million(hourly_price, speed.tokens_per_second):
        lines.append(f"  {dollars:.2f} USD per million output tokens ({PRICES})")
    lines.append(f"  corrected: {speed.origin}" if speed.origin else f"  {HINT}")
    return lines


def speed_json(speed: Speed, hourly_price: float | None) -> dict[str, Any]:
    return {
        **vars(speed.load),
        "running": speed.running,
        "tokens_per_second": speed.tokens_per_second,
        "tokens_per_second_per_stream": speed.per_stream if speed.itl else None,
        "ttft_seconds": speed.ttft,
        "ttft_of_burst_seconds": speed.ttft_of_burst,
        "itl_seconds": speed.itl,
        "usd_per_million_tokens": usd_per_million(hourly_price, speed.tokens_per_second),
        "limit": speed.limit,
        "corrected_by": speed.origin,
    }

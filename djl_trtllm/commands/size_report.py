"""What `djl-trtllm size` prints of one model on one machine: a table for people, and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from djl_trtllm.commands.columns import columns
from djl_trtllm.commands.size_request import SizeRequest
from djl_trtllm.sizing.advice import warnings_of
from djl_trtllm.sizing.comparison import degrees_of
from djl_trtllm.sizing.gpus import PRICES
from djl_trtllm.sizing.machines import Machine
from djl_trtllm.sizing.recommendation import Recommendation

_GIB = 1 << 30
_WIDENED, _WIDENED_BATCH = 4096, 256
_FP8_SINCE = (8, 9)


@dataclass(frozen=True)
class Report:
    request: SizeRequest
    machine: Machine
    found: Recommendation

    @property
    def tokens(self) -> int:
        return self.found.max_num_tokens

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of each GPU by part; they add up to its memory, or to more where it does not fit."""
        estimate = self.found.estimate
        parts = {
            "weights": estimate.weights,
            "activations": estimate.activations(self.tokens) + estimate.logits,
            "communication": estimate.communication,
            "overhead": estimate.overhead,
            "kv_cache": estimate.kv_bytes(self.tokens) if self.found.fits else 0,
        }
        return parts | {"unused": max(0, estimate.conditions.gpu_memory - sum(parts.values()))}

    @property
    def kv_tokens(self) -> int:
        return self.found.estimate.kv_tokens(self.tokens) if self.found.fits else 0

    @property
    def sequences(self) -> int:
        return self.found.estimate.sequences_of(self.request.length, self.tokens) if self.found.fits else 0

    @cached_property
    def settings(self) -> dict[str, str]:
        """The options to paste, with the limits that max_num_tokens raises."""
        if not self.found.fits:
            return {}
        options, estimate = self.request.config.options, self.found.estimate
        degrees = {"tensor_parallel_degree": str(estimate.conditions.tensor_parallel)}
        if estimate.conditions.pipeline_parallel > 1:
            degrees["pipeline_parallel_degree"] = str(estimate.conditions.pipeline_parallel)
        known = (*degrees, "max_input_len", "max_output_len")
        given = {name: value for name, value in self.request.settings.items() if name not in known}
        floor = min(_WIDENED, self.tokens)
        longest = self.request.input_len
        chunked = {"enable_chunked_prefill": "true"} if self.tokens < max(floor, longest) else {}
        return {
            **degrees,
            **given,
            "max_num_tokens": str(self.tokens),
            "max_input_len": str(max(floor, longest)),
            "max_output_len": str(max(floor, self.request.output_len)),
            "max_rolling_batch_size": str(max(_WIDENED_BATCH, options.max_rolling_batch_size)),
            **chunked,
        }

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        shortened = () if self.request.shortened is None else (self.request.shortened,)
        return shortened + self._warnings + self._without_fp8 + self.machine.remarks

    @property
    def _without_fp8(self) -> tuple[str, ...]:
        conditions, capability = self.found.estimate.conditions, self.machine.compute_capability
        if conditions.quantization != "fp8" or capability is None or capability >= _FP8_SINCE:
            return ()
        return (f"{self.machine.gpu} does not compute in FP8: option.quantize=fp8 needs an L4, an H100 or later",)

    @property
    def _warnings(self) -> tuple[str, ...]:
        if self.found.refusal is not None:
            return (f"{self.request.sizes.source} does not fit: {self.found.refusal}", *self._remedies)
        if self.found.row is not None and self.found.estimate.max_num_tokens == 0:
            return ("the estimate says out of memory where the table has a measurement; the measurement is used",)
        return warnings_of(self.found.estimate, self.tokens)

    @property
    def _remedies(self) -> list[str]:
        """What makes it fit, tried out."""
        degree = self.found.estimate.conditions.tensor_parallel
        found = [
            f"it fits with --tp {more}"
            for more in degrees_of(self.machine, self.request.sizes)
            if more > degree and self.request.on(self.machine, more).fits
        ][:1]
        if not found and self.machine.gpus is not None:
            found.append("use a machine with more memory: djl-trtllm size MODEL --compare shows which ones hold it")
        return found

    def as_json(self) -> dict[str, Any]:
        request, found, machine = self.request, self.found, self.machine
        estimate, shape = found.estimate, request.sizes.shape
        return {
            "model": {
                "source": request.sizes.source,
                "parameters": request.sizes.parameters,
                "bytes": request.sizes.bytes,
                "exact": request.sizes.exact,
                "quantization": request.sizes.quantization,
                "layers": shape.num_layers,
                "hidden_size": shape.hidden,
                "heads": shape.num_heads,
                "kv_heads": shape.num_kv_heads,
                "vocabulary": shape.vocab_size,
                "experts": request.sizes.experts,
            },
            "machine": machine_as_json(machine),
            "tensor_parallel": estimate.conditions.tensor_parallel,
            "pipeline_parallel": estimate.conditions.pipeline_parallel,
            "fits": found.fits,
            "max_num_tokens": self.tokens or None,
            "origin": found.origin if found.fits else None,
            "largest_max_num_tokens": found.maximum,
            "estimated_largest_max_num_tokens": estimate.max_num_tokens,
            "measured": None
            if found.row is None
            else {"row": str(found.row), "max_num_tokens": found.row.max_num_tokens},
            "memory_per_gpu": self.memory,
            "kv_bytes_per_token": estimate.kv_bytes_per_token,
            "kv_tokens": self.kv_tokens,
            "sequences": {"input": request.input_len, "output": request.output_len, "count": self.sequences},
            "options": {f"option.{name}": value for name, value in self.settings.items()},
            "warnings": list(self.warnings),
        }

    def lines(self) -> list[str]:
        """The report for people, without warnings; the lines to paste are its end."""
        return [
            *self._model_lines(),
            "",
            *self._memory_lines(),
            "",
            *self._capacity_lines(),
            *(["", *self._option_lines()] if self.found.fits else []),
        ]

    def _model_lines(self) -> list[str]:
        sizes, conditions = self.request.sizes, self.found.estimate.conditions
        shape = sizes.shape
        experts = f", {sizes.experts} experts" if sizes.experts else ""
        how = "" if sizes.exact else ", counted from config.json"
        as_stored = f" in {sizes.quantization}" if sizes.quantization else f" in {shape.dtype}" if shape.dtype else ""
        becomes = f", quantised with {conditions.quantization}" if conditions.quantization else ""
        price = self.machine.hourly_price
        cost = "" if price is None else f", {price:.2f} USD per hour"
        groups = f", pipeline parallel {conditions.pipeline_parallel}" if conditions.pipeline_parallel > 1 else ""
        engine = "TensorRT engine" if self.request.compiled else "PyTorch"
        return [
            f"{sizes.source}: {_count(sizes.parameters)} parameters{as_stored}, {_gib(sizes.bytes)} GiB{how}{becomes}",
            f"  {shape.num_layers} layers, hidden size {shape.hidden}, {shape.num_heads} heads of which "
            f"{shape.num_kv_heads} in the KV cache, vocabulary {shape.vocab_size}{experts}",
            f"on {self.machine}{cost}; tensor parallel {conditions.tensor_parallel}{groups}, {engine}",
        ]

    def _memory_lines(self) -> list[str]:
        total = self.found.estimate.conditions.gpu_memory
        notes = {
            "activations": f"for max_num_tokens {self.tokens}" if self.tokens else "",
            "kv_cache": f"{self.found.estimate.conditions.fraction:g} of what the others leave",
        }
        names = {"kv_cache": "KV cache"}
        rows = [("memory of each GPU", "GiB", "share", "")]
        for name, size in self.memory.items():
            rows.append((names.get(name, name), _gib(size), f"{100 * size / total:.1f} %", notes.get(name, "")))
        needed = sum(self.memory.values())
        if needed > total:
            rows.append(("needed", _gib(needed), "", ""))
        rows.append(("the GPU has", _gib(total), "", ""))
        return columns(rows, right=(1, 2))

    def _capacity_lines(self) -> list[str]:
        estimate, request, found = self.found.estimate, self.request, self.found
        if not found.fits:
            return [f"max_num_tokens: none fits; the KV cache takes {estimate.kv_bytes_per_token:,} bytes per token"]
        capacity = (
            f"KV cache: {estimate.kv_bytes_per_token:,} bytes per token and GPU, {self.kv_tokens:,} tokens: "
            f"{self.sequences} sequences of {request.length} tokens ({request.input_len} in, {request.output_len} out)"
        )
        lines = [capacity, f"max_num_tokens: {self.tokens}, from {found.origin}"]
        if found.row is not None:
            lines.append(
                f"  the estimate of the largest one is {estimate.max_num_tokens}, the table has {found.maximum}"
            )
        return lines

    def _option_lines(self) -> list[str]:
        return [
            "# For serving.properties. max_num_tokens raises the lengths to 4096 and the batch to 256, at least.",
            "# Without it the server finds the number itself, and raises nothing.",
            *(f"option.{name}={value}" for name, value in self.settings.items()),
        ]


def machine_as_json(machine: Machine) -> Mapping[str, Any]:
    price = machine.hourly_price
    return {
        "name": machine.name,
        "gpu": machine.gpu,
        "gpus": machine.gpus,
        "gpu_memory": machine.memory,
        "usd_per_hour": price,
        "price": None if price is None else str(PRICES),
    }


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 10**9 else f"{parameters / 1e6:.1f} million"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"

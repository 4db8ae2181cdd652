"""Options whose values are derived from other options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from djl_trtllm.config.options.server import ServerOptions
from djl_trtllm.config.options.values import as_text
from djl_trtllm.config.sources.origin import Origin
from djl_trtllm.config.sources.properties import Setting


@dataclass
class Draft:
    """A `Config` under construction: the values that users set, with the setting that is used, and derived values."""

    values: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, Setting] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def is_set(self, name: str) -> bool:
        return name in self.chosen and name in self.values

    def derive(self, name: str, value: Any, rule: str) -> None:
        self.values[name] = value
        self.origins[name] = Origin.derived(rule)


def raise_limits_for_max_num_tokens(draft: Draft) -> None:
    """`max_num_tokens`, set by the user to N, raises the limits that would keep batches below it.

    Input and output length to at least min(4096, N), the batch to at least 256 (finding-max-num-tokens.md).
    """
    tokens = draft.values.get("max_num_tokens")
    if tokens is None:
        return
    cause = draft.chosen["max_num_tokens"]
    if cause.alone:
        return
    for name, floor in (
        ("max_input_len", min(4096, tokens)),
        ("max_output_len", min(4096, tokens)),
        ("max_rolling_batch_size", 256),
    ):
        own = draft.values.get(name)
        if own is not None and own >= floor:
            continue
        rule = f"option.max_num_tokens={tokens} ({cause.origin})"
        if own is not None:
            setting = draft.chosen[name]
            draft.warnings.append(
                f"{setting.formatted} is raised to {floor}, because {cause.formatted} sets it to max({floor}, your "
                "value); to keep a smaller value, leave option.max_num_tokens out"
            )
            rule += f", which raises {as_text(own)} ({setting.origin})"
        draft.derive(name, floor, rule)


def run_as_many_sequences_as_the_engine_holds(draft: Draft) -> None:
    """`option.max_batch_size` (TensorRT-LLM's name) is the batch, in the engine and in the server.

    LMI's `option.max_num_sequences` is the engine's only.
    """
    sequences = draft.values.get("max_num_sequences")
    setting = draft.chosen.get("max_num_sequences")
    if sequences is None or setting is None or draft.is_set("max_rolling_batch_size"):
        return
    if setting.key == "option.max_batch_size":
        draft.derive("max_rolling_batch_size", sequences, setting.formatted)


def split_addresses(draft: Draft) -> None:
    """`inference_address` and `management_address` set host and port, unless they are set."""
    _split_address(draft, "inference_address", "host", "port")
    _split_address(draft, "management_address", "management_host", "management_port")
    values, server = draft.values, ServerOptions()
    one = (values.get("host", server.host), values.get("port", server.port))
    if not draft.is_set("management_port") and one == (values.get("management_host"), values.get("management_port")):
        # DJL Serving's way to say that it has no port of its own.
        draft.derive("management_port", 0, f"{draft.chosen['management_address'].formatted}, that of the requests")


def _split_address(draft: Draft, name: str, host_option: str, port_option: str) -> None:
    address = draft.values.get(name)
    if address is None:
        return
    setting = draft.chosen[name]
    scheme = "http" if draft.values.get("certificate_file") is None else "https"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme != scheme or not host or parts.username or parts.path not in ("", "/") or parts.query:
        problem = f"{setting.formatted}: expected {scheme}://HOST:PORT"
        if host and {scheme, parts.scheme} == {"http", "https"}:
            tls = "certificate_file and private_key_file"
            problem += f"; for TLS set {tls}" if scheme == "http" else f", because {tls} are set"
        draft.problems.append(problem)
        return
    rule = setting.formatted
    if not draft.is_set(host_option):
        draft.derive(host_option, host, rule)
    if not draft.is_set(port_option):
        draft.derive(port_option, (80 if scheme == "http" else 443) if port is None else port, rule)


def place_engine_cache(draft: Draft) -> None:
    """The engine cache is the djl-trtllm folder of DJL's cache folder, else of the download folder."""
    if draft.values.get("engine_cache_dir") is not None:
        return
    for name in ("cache_dir", "download_dir"):
        folder = draft.values.get(name)
        if folder is not None:
            setting = draft.chosen[name]
            draft.derive("engine_cache_dir", folder / "djl-trtllm", setting.formatted)
            return


DERIVATIONS: tuple[Callable[[Draft], None], ...] = (
    raise_limits_for_max_num_tokens,
    run_as_many_sequences_as_the_engine_holds,
    split_addresses,
    place_engine_cache,
)
"""All derivations, in the order in which they run."""

"""What the server takes from the network: bounds of requests as bytes, of connections and of their time."""

from __future__ import annotations

from djl_trtllm.config.options.documents import OURS
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Scope, option


class ConnectionOptions(OptionGroup):
    """Limits that hold before a request is understood."""

    max_connections: int = option(
        16384,
        "Connections that may be open at once. One more closes the one that is idle longest; if none is idle, it is "
        "answered with 503, except for health checks. Less where the limit of file descriptors (`ulimit -Hn`) does "
        "not suffice; the log says so.",
        key="max_connections",
        unit="connections",
        at_least=1,
        effect="bound of open connections",
        source=OURS,
        scope=Scope.SERVER,
    )
    max_header_size: int = option(
        32768,
        "Largest head of a request: request line and headers. More is refused with 431. Trailers, and what a chunked "
        "body has besides its content, may be as large.",
        key="max_header_size",
        unit="bytes",
        at_least=1024,
        effect="bound of everything in a request that is not its body",
        source=OURS,
        scope=Scope.SERVER,
    )
    max_header_count: int = option(
        100,
        "Headers that a request may have, trailers included. More are refused with 431.",
        key="max_header_count",
        unit="headers",
        at_least=1,
        effect="bound of the number of headers",
        source=OURS,
        scope=Scope.SERVER,
    )
    max_url_size: int = option(
        8192,
        "Longest address in a request line, with its query. A longer one is refused with 414.",
        key="max_url_size",
        unit="bytes",
        at_least=128,
        effect="bound of the address of a request",
        source=OURS,
        scope=Scope.SERVER,
    )
    max_body_memory: int = option(
        134217728,
        "Memory for the request bodies that are being read and parsed, of all requests together. A body is refused "
        "with 503 when it needs more than the others leave free after it, so that small requests always find a "
        "place; a single one may have half of this.",
        key="max_body_memory",
        unit="bytes",
        at_least=65536,
        effect="bound of all request bodies in memory",
        source=OURS,
        scope=Scope.SERVER,
    )
    header_read_timeout: float = option(
        30.0,
        "Time from the first byte of a request to the end of its headers. Then it is answered with 408.",
        key="header_read_timeout",
        unit="seconds",
        above=0,
        effect="deadline of reading headers",
        source=OURS,
        scope=Scope.SERVER,
    )
    body_read_timeout: float = option(
        60.0,
        "Time for reading the body of a request, and a second more for every 16 KiB of it that have come. Then it is "
        "answered with 408.",
        key="body_read_timeout",
        unit="seconds",
        above=0,
        effect="deadline of reading a body",
        source=OURS,
        scope=Scope.SERVER,
    )
    keep_alive_timeout: float = option(
        75.0,
        "Time that a connection may be open without a request. Keep it above that of a load balancer in front (60 "
        "seconds on AWS), or the balancer uses connections that are just being closed.",
        key="keep_alive_timeout",
        unit="seconds",
        above=0,
        effect="longest idle time of a connection",
        source=OURS,
        scope=Scope.SERVER,
    )

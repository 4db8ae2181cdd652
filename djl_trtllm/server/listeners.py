"""The ports of HTTP: the server's own, Triton's numbers, and that of the management API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError

_OPTIONS = ("management_port", "triton_http_port", "triton_metrics_port")


class Listener(NamedTuple):
    """`option` is the one that the port is from, `without` what to do without the port."""

    host: str
    port: int
    option: str
    without: str = " or to 0 for none"


def further_listeners(options: Options) -> list[Listener]:
    """One for each port, the server's own not among them."""
    ports = {getattr(options, name): name for name in reversed(_OPTIONS)}
    return [
        Listener(options.management_host if name == "management_port" else options.host, port, name)
        for port, name in sorted(ports.items())
        if port not in (0, options.port)
    ]


async def listen(
    options: Options, protocol: Callable[[], asyncio.Protocol], backlog: int
) -> list[asyncio.base_events.Server]:
    """Listen on all ports. Raises ConfigError if one is in use; then none is open."""
    servers: list[asyncio.base_events.Server] = []
    loop = asyncio.get_running_loop()
    own = Listener(options.host, options.port, "inference_port", "")
    for host, port, name, without in (own, *further_listeners(options)):
        try:
            server = await loop.create_server(protocol, host, port, backlog=backlog)
        except OSError as error:
            for opened in servers:
                opened.close()
            variable = f"SERVING_{name.upper()}"
            raise ConfigError(
                [
                    f"{name}={port}: cannot listen on {host}:{port}: {error.strerror or error}; end the program that "
                    f"uses the port, or set {variable} to another one{without}"
                ]
            ) from None
        servers.append(server)
    return servers

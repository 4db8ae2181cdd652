"""Fairness among clients: who a request is from, whose turn it is, and how much one client may have."""

from __future__ import annotations

from djl_trtllm.config.options.choices import SchedulingPolicy
from djl_trtllm.config.options.documents import OURS
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Scope, option


class ClientOptions(OptionGroup):
    """Options of the operator, who knows what is in front of the server."""

    scheduling_policy: SchedulingPolicy = option(
        SchedulingPolicy.FAIR,
        "Order of waiting requests. `fair`: clients get equal shares of the tokens, and each client's requests run in "
        "the order in which they came. `fcfs`: first come, first served, over all clients.",
        key="scheduling_policy",
        effect="order of the waiting queue",
        source="vLLM's name",
        scope=Scope.SERVER,
    )
    client_header: str | None = option(
        None,
        "Header that names the client of a request, where requests have no API key of their own. Clients can write "
        "what they like into it: let a gateway set it. Without it, or without the header, a client is an address.",
        key="client_header",
        example="x-user-id",
        effect="client of a request",
        source=OURS,
        scope=Scope.SERVER,
    )
    priority_header: str | None = option(
        None,
        "Header with the priority of a request: `high`, `normal` or `low`. Requests with a higher one go first. "
        "Without this option no request has a priority.",
        key="priority_header",
        example="x-priority",
        effect="priority of a request",
        source=OURS,
        scope=Scope.SERVER,
    )
    max_requests_per_client: int = option(
        0,
        "Requests that a client may have at once, running and waiting. One more is refused with 429. 0: as many as "
        "there is room for.",
        key="max_requests_per_client",
        unit="requests",
        at_least=0,
        effect="bound of a client's requests",
        source=OURS,
        scope=Scope.SERVER,
    )
    forwarded_allow_ips: tuple[str, ...] = option(
        ("127.0.0.1", "::1"),
        "Addresses and networks of the proxies whose `X-Forwarded-For` is believed, `*` for any.",
        key="forwarded_allow_ips",
        effect="address of a client behind a proxy",
        source="uvicorn",
        scope=Scope.SERVER,
    )

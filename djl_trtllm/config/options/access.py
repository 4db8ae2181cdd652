"""Who may use the server: API keys, TLS, and the address of the management API."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.config.options.documents import DJL, OURS
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Scope, option

PROTECTING = ("api_key", "api_keys_file", "certificate_file", "private_key_file", "client_ca_file")
"""Options that must not be empty: `SERVING_API_KEY=$KEY` without a KEY would leave the server open."""


class AccessOptions(OptionGroup):
    """Options of the operator: no file of a model sets keys or certificates."""

    api_key: str | None = option(
        None,
        "A key that requests must have, as `Authorization: Bearer KEY` or `x-api-key: KEY`. It may do everything: "
        "generate, manage models and adapters, read metrics. /ping and the health pages need no key.",
        key="api_key",
        example="SECRET",
        effect="requests without it get 401",
        source=OURS,
        scope=Scope.OPERATOR,
    )
    api_keys_file: Path | None = option(
        None,
        "A YAML file with further keys and what each may do (docs/access.md).",
        key="api_keys_file",
        example="/etc/djl-trtllm/keys.yaml",
        effect="requests need one of its keys, with the role for what they ask",
        source=OURS,
        scope=Scope.OPERATOR,
    )
    management_address: str | None = option(
        None,
        "Address of the management API, as `http://HOST:PORT`.",
        key="management_address",
        example="http://127.0.0.1:8081",
        default_note="that of the requests",
        effect="gives management_host and management_port where these are not set themselves",
        source=DJL,
        scope=Scope.SERVER,
    )
    management_host: str = option(
        "127.0.0.1",
        "Network address of the management API, if it has a port of its own.",
        key="management_host",
        effect="listening address of management_port",
        source=OURS,
        scope=Scope.SERVER,
    )
    management_port: int = option(
        0,
        "Port of the management API: models and adapters. It is then not on the port of the requests, nor are they on "
        "it; health pages and metrics are on both. 0: it is on the port of the requests.",
        key="management_port",
        at_least=0,
        at_most=65535,
        effect="listening port of the management API",
        source=OURS,
        scope=Scope.SERVER,
    )
    certificate_file: Path | None = option(
        None,
        "Certificate for TLS with its chain, in PEM. With `private_key_file` all ports speak TLS.",
        key="certificate_file",
        example="/etc/djl-trtllm/certificate.pem",
        effect="HTTPS in the place of HTTP",
        source=DJL,
        scope=Scope.OPERATOR,
    )
    private_key_file: Path | None = option(
        None,
        "Private key of `certificate_file`, in PEM, without a password.",
        key="private_key_file",
        example="/etc/djl-trtllm/key.pem",
        effect="HTTPS in the place of HTTP",
        source=DJL,
        scope=Scope.OPERATOR,
    )
    client_ca_file: Path | None = option(
        None,
        "Certificates, in PEM, of the authorities that sign clients' certificates. Clients must then have one.",
        key="client_ca_file",
        example="/etc/djl-trtllm/clients.pem",
        effect="connections without a certificate from them are refused",
        source=OURS,
        scope=Scope.OPERATOR,
    )

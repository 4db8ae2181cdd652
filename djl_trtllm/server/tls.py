"""TLS, with the operator's certificate."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError

_NEEDS = {
    "certificate_file": "private_key_file",
    "private_key_file": "certificate_file",
    "client_ca_file": "certificate_file",
}


def tls_arguments(options: Options) -> dict[str, Any]:
    """uvicorn's arguments for TLS, none without a certificate. Raises ConfigError for files that cannot be used."""
    for name, needed in _NEEDS.items():
        if getattr(options, name) is not None and getattr(options, needed) is None:
            raise ConfigError([f"{name}={getattr(options, name)}: TLS needs {needed} as well"])
    certificate, key, authorities = options.certificate_file, options.private_key_file, options.client_ca_file
    if certificate is None or key is None:
        return {}
    for name in _NEEDS:
        _require_readable(name, getattr(options, name))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            [
                f"certificate_file={certificate}, private_key_file={key}: expected a certificate and its private key, "
                "in PEM and without a password"
            ]
        ) from None
    arguments: dict[str, Any] = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    if authorities is None:
        return arguments
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError:
        raise ConfigError([f"client_ca_file={authorities}: expected certificates in PEM"]) from None
    return {**arguments, "ssl_ca_certs": str(authorities), "ssl_cert_reqs": ssl.CERT_REQUIRED}


def _require_readable(name: str, path: Path | None) -> None:
    try:
        if path is not None:
            path.open("rb").close()
    except OSError as error:
        raise ConfigError([f"{name}={path}: cannot be read: {error.strerror}"]) from None

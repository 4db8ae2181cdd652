"""TLS, with the operator's certificate."""

from __future__ import annotations

import _ssl
import logging
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError

logger = logging.getLogger(__name__)

_SOON_DAYS = 30
_DAY_SECONDS = 86400
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
    # It has no public name, nor stubs; what has shows the certificates of authorities only.
    _warn_of_dates("certificate_file", certificate, _ssl._test_decode_cert(str(certificate)))  # type: ignore[attr-defined]
    arguments: dict[str, Any] = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    if authorities is None:
        return arguments
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError:
        raise ConfigError([f"client_ca_file={authorities}: expected certificates in PEM"]) from None
    for authority in context.get_ca_certs():
        _warn_of_dates("client_ca_file", authorities, authority)
    return {**arguments, "ssl_ca_certs": str(authorities), "ssl_cert_reqs": ssl.CERT_REQUIRED}


def _warn_of_dates(name: str, path: Path, certificate: Mapping[str, Any]) -> None:
    """Say when a certificate is not valid now or ends soon. There are clients that do not check it."""
    begin, end, now = certificate["notBefore"], certificate["notAfter"], time.time()
    days = (ssl.cert_time_to_seconds(end) - now) / _DAY_SECONDS
    if days <= 0:
        problem = f"has expired at {end}; clients that check it refuse to connect: renew it"
    elif ssl.cert_time_to_seconds(begin) > now:
        problem = f"is not valid before {begin}; clients that check it refuse to connect: check the clock, or wait"
    elif days < _SOON_DAYS:
        problem = f"expires at {end}, in {days:.0f} days: renew it, and restart the server, which reads it at its start"
    else:
        return
    owner = "".join(f"{field}={value} " for part in certificate.get("subject", ()) for field, value in part)
    logger.warning("%s=%s: the certificate %s%s", name, path, owner and f"of {owner}", problem)


def _require_readable(name: str, path: Path | None) -> None:
    try:
        if path is not None:
            path.open("rb").close()
    except OSError as error:
        raise ConfigError([f"{name}={path}: cannot be read: {error.strerror}"]) from None

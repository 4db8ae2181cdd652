from __future__ import annotations

import logging
import re
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError
from djl_trtllm.server.tls import tls_arguments
from tests.support.certificates import Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def test_without_a_certificate_there_is_no_tls() -> None:
    assert tls_arguments(Options()) == {}


def test_certificate_and_key_are_uvicorns_arguments(certificates: Certificates) -> None:
    options = Options(certificate_file=certificates.certificate, private_key_file=certificates.key)
    expected = {"ssl_certfile": str(certificates.certificate), "ssl_keyfile": str(certificates.key)}
    assert tls_arguments(options) == expected
    with_clients = options.model_copy(update={"client_ca_file": certificates.authority})
    of_clients = {"ssl_ca_certs": str(certificates.authority), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    assert tls_arguments(with_clients) == {**expected, **of_clients}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"certificate_file": "certificate"}, "certificate_file=.*: TLS needs private_key_file as well"),
        ({"private_key_file": "key"}, "private_key_file=.*: TLS needs certificate_file as well"),
        ({"client_ca_file": "authority"}, "client_ca_file=.*: TLS needs certificate_file as well"),
        ({"certificate_file": "missing", "private_key_file": "key"}, "certificate_file=.*missing: cannot be read: No"),
        ({"certificate_file": "certificate", "private_key_file": "missing"}, "private_key_file=.*missing: cannot be"),
        ({"certificate_file": "key", "private_key_file": "key"}, "expected a certificate and its private key, in PEM"),
        ({"certificate_file": "certificate", "private_key_file": "locked_key"}, "without a password"),
        ({"certificate_file": "authority", "private_key_file": "key"}, "expected a certificate and its private key"),
        (
            {"certificate_file": "certificate", "private_key_file": "key", "client_ca_file": "key"},
            "client_ca_file=.*: expected certificates in PEM",
        ),
        (
            {"certificate_file": "certificate", "private_key_file": "key", "client_ca_file": "missing"},
            "client_ca_file=.*missing: cannot be read",
        ),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    given: dict[str, str], problem: str, certificates: Certificates, tmp_path: Path
) -> None:
    files: dict[str, Any] = {name: getattr(certificates, file, tmp_path / "missing") for name, file in given.items()}
    with pytest.raises(ConfigError, match=problem):
        tls_arguments(Options(**files))


_DAY = 86400


@pytest.mark.parametrize(
    ("later", "problem"),
    [
        (61, r"has expired at \w+ +\d+ .* GMT; clients that check it refuse to connect: renew it"),
        (-1, r"is not valid before \w+ +\d+ .* GMT; .*: check the clock"),
        (31, r"expires at \w+ +\d+ .* GMT, in 29 days: renew it"),
        (29, ""),
    ],
)
def test_a_certificate_that_is_not_valid_or_not_for_long_is_a_warning_with_its_file_and_date(
    later: int,
    problem: str,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = time.time() + later * _DAY
    monkeypatch.setattr("djl_trtllm.server.tls.time.time", lambda: now)
    options = Options(
        certificate_file=certificates.certificate,
        private_key_file=certificates.key,
        client_ca_file=certificates.authority,
    )
    with caplog.at_level(logging.WARNING):
        assert tls_arguments(options)
    if not problem:
        assert not caplog.messages
        return
    for told, name, path, owner in zip(
        caplog.messages,
        ("certificate_file", "client_ca_file"),
        (certificates.certificate, certificates.authority),
        ("server", "authority"),
        strict=True,
    ):
        assert re.fullmatch(rf"{name}={path}: the certificate of commonName={owner} {problem}.*", told)

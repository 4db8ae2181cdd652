"""Certificates for tests of TLS, made with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Certificates:
    """An authority, a server's certificate for 127.0.0.1 that it signed, and a client's."""

    def __init__(self, folder: Path, days: int = 60) -> None:
        self._folder = folder
        self._days = days
        self.authority = folder / "authority.pem"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", str(days)),
            *("-subj", "/CN=authority", "-keyout", "authority.key", "-out", "authority.pem"),
        )
        self.certificate, self.key = self._signed("server", "subjectAltName=IP:127.0.0.1,DNS:localhost")
        self.client, self.client_key = self._signed("client", "subjectAltName=DNS:client")
        self.locked_key = folder / "locked.key"
        self._openssl("ec", "-in", str(self.key), "-aes128", "-passout", "pass:secret", "-out", "locked.key")

    def _signed(self, name: str, extension: str) -> tuple[Path, Path]:
        (self._folder / f"{name}.ext").write_text(extension)
        self._openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        self._openssl(
            *(
                "x509",
                "-req",
                "-in",
                f"{name}.csr",
                "-CA",
                "authority.pem",
                "-CAkey",
                "authority.key",
                "-days",
                str(self._days),
            ),
            *("-CAcreateserial", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
        return self._folder / f"{name}.pem", self._folder / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)

"""A certificate authority of the tests, and certificates for 127.0.0.1, made by the ``openssl`` of the machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """A private key and its certificate, PEM."""

    key: bytes
    certificate: bytes


def authority(directory: Path) -> Pair:
    """A certificate that signs others."""
    return _make(directory, "authority", [])


def signed(directory: Path, name: str) -> Pair:
    """A certificate for 127.0.0.1, signed by the authority in ``directory``."""
    return _make(directory, name, ["-CA", "authority.pem", "-CAkey", "authority.key"])


def _make(directory: Path, name: str, signer: list[str]) -> Pair:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-keyout", f"{name}.key", "-out", f"{name}.pem", *signer]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"] if signer else []
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=60)
    return Pair((directory / f"{name}.key").read_bytes(), (directory / f"{name}.pem").read_bytes())

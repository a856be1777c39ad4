"""Makes a Java trust the system's certificate authorities.

A Java from a wheel trusts only the authorities that it was built with, but a machine may reach the network through a
proxy whose authority an administrator has added to the system's bundle. Java cannot read PEM as a trust store, so the
bundle is written in the oldest and simplest format, JKS (defined by OpenJDK's sun.security.provider.JavaKeyStore).
"""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import struct
from pathlib import Path

PASSWORD = "changeit"  # noqa: S105 - Java's default; the store contains no secret.
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_MAGIC, _VERSION, _TRUSTED_CERTIFICATE = 0xFEEDFEED, 2, 2


def system_bundle() -> Path | None:
    """The file with the system's authorities; None if it is at none of the usual paths."""
    named = (os.environ.get("SSL_CERT_FILE"), ssl.get_default_verify_paths().cafile, *_BUNDLES)
    return next((Path(name) for name in named if name and Path(name).is_file()), None)


def write_trust_store(bundle: Path, store: Path) -> None:
    """Write the certificates of `bundle`, a PEM file, to `store`, for `javax.net.ssl.trustStore`."""
    certificates = [ssl.PEM_cert_to_DER_cert(pem) for pem in _PEM.findall(bundle.read_text(errors="replace"))]
    body = struct.pack(">III", _MAGIC, _VERSION, len(certificates))
    for number, certificate in enumerate(certificates):
        body += struct.pack(">I", _TRUSTED_CERTIFICATE) + _text(f"ca-{number}") + bytes(8) + _text("X.509")
        body += struct.pack(">I", len(certificate)) + certificate
    seal = hashlib.sha1(PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + body)  # noqa: S324 - the form's own.
    store.write_bytes(body + seal.digest())


def _text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()

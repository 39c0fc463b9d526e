"""Certificates that hold when a test says."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

NOW = datetime.now(timezone.utc).replace(microsecond=0)


def certificate(folder: Path, begins: datetime, ends: datetime, name: str = "board.pem") -> Path:
    """A certificate that signs itself."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "acme.board-1")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )
    path = folder / name
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(b"subject=CN = acme.board-1\n" + pem)
    path.with_suffix(".key").write_bytes(secret)
    return path

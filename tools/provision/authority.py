"""Certificates: an authority of one key that signs boards', services' and brokers' names, and its revocation list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# A board whose clock is a little behind is not locked out on its first day.
BACKDATED = timedelta(hours=1)
# An authority that is offline cannot refresh its list in time, and a broker with an outdated one lets nobody in.
LIST_LIFE = timedelta(days=3650)


@dataclass(frozen=True)
class Authority:
    """key: ECDSA P-256; certificate: its own, self-signed."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, name: str, now: datetime, life: timedelta) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, subject, key.public_key(), now, now + life)
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_others=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    def client(
        self, user: str, unit: str, public_key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
    ) -> x509.Certificate:
        """For who connects to the broker. user: the name that the broker knows it by; unit: which of those that share
        the name, "" where there is one; life: cut at the authority's own end.
        """
        names = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
        if unit:
            names.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit))
        return self._leaf(x509.Name(names), public_key, now, life, ExtendedKeyUsageOID.CLIENT_AUTH)

    def server(
        self, hosts: Iterable[str], public_key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
    ) -> x509.Certificate:
        """For a broker that clients reach under `hosts`, names or addresses; the first is its common name."""
        names = list(hosts)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        extra = [x509.SubjectAlternativeName([general_name(host) for host in names])]
        return self._leaf(subject, public_key, now, life, ExtendedKeyUsageOID.SERVER_AUTH, extra)

    def _leaf(
        self,
        subject: x509.Name,
        public_key: ec.EllipticCurvePublicKey,
        now: datetime,
        life: timedelta,
        purpose: x509.ObjectIdentifier,
        extra: Iterable[x509.ExtensionType] = (),
    ) -> x509.Certificate:
        ends = min(now + life, self.certificate.not_valid_after_utc)
        builder = _builder(subject, self.certificate.subject, public_key, now, ends)
        builder = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_others=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        for extension in extra:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def revocations(self, revoked: Iterable[tuple[int, datetime]], now: datetime) -> bytes:
        """The revocation list, PEM. revoked: (serial, since when)."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - BACKDATED)
            .next_update(now + LIST_LIFE)
        )
        for serial, since in revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(since).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def hosts_of(certificate: x509.Certificate) -> set[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(ends)
    )


def _usage(signs_others: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_others,
        key_cert_sign=signs_others,
        crl_sign=signs_others,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )

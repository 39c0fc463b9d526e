"""Why there is no connection, in words: what happened, and what to do about it."""

from __future__ import annotations

import errno
import socket
import ssl
import time

from paho.mqtt.reasoncodes import ReasonCode

REMEDIES = {
    0x84: "The broker must speak MQTT 5.",
    0x85: "Check `client_id` in [broker].",
    0x86: "Check `username` and `password_file` in [broker].",
    0x87: "Check `username` and `password_file` in [broker], and the broker's access list.",
    0x8A: "Ask the broker's operator to lift the ban.",
    0x8E: "Another process uses the same client id: stop it, or give this one a `client_id` of its own.",
}

NOT_YET_VALID, EXPIRED = 9, 10  # OpenSSL's X509_V_ERR_CERT_...

# How the broker refuses a client's certificate: TLS alerts, as OpenSSL names them.
ALERTS = {
    "CERTIFICATE_REQUIRED": ("wants a certificate", "Set `cert` and `key` in [broker.tls]."),
    "CERTIFICATE_EXPIRED": ("says that `cert` has expired", "Renew it, or set the broker's clock if that is wrong."),
    "CERTIFICATE_REVOKED": ("says that `cert` is revoked", "Enrol anew, with a new code."),
    "UNKNOWN_CA": ("does not know the authority of `cert`", "Enrol with the authority of this broker's fleet."),
    "BAD_CERTIFICATE": ("does not take `cert`", "Compare its dates with the broker's clock: it may not be valid yet."),
    "UNSUPPORTED_CERTIFICATE": ("does not take `cert`", "It is for another purpose than to be a client's."),
}


class Refusal(OSError):
    """A connection that somebody on the way to the broker did not make. what, remedy: as `explain` returns them."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


def remedy(reason: ReasonCode) -> str:
    """What to do about a broker's reason code."""
    return REMEDIES.get(reason.value, "Trying again.")


def explain(error: OSError, *, proxied: bool = False) -> tuple[str, str]:
    """(what, remedy) for a connection that could not be made. proxied: a proxy is on the way."""
    if isinstance(error, Refusal):
        return error.what, error.remedy
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in (NOT_YET_VALID, EXPIRED):
            return (
                f"TLS: the broker's {error.verify_message}",
                f"This machine's clock says {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC: set it if that is "
                "wrong, else renew the broker's certificate.",
            )
        remedy = "Check `ca` in [broker.tls], and that `host` is the certificate's name."
        if proxied:
            remedy += " A proxy that opens TLS must make an exception for this host."
        return f"TLS: {error.verify_message}", remedy
    if isinstance(error, ssl.SSLError):
        for name, (what, remedy) in ALERTS.items():
            if (error.reason or "").endswith(f"_ALERT_{name}"):
                return f"TLS: the broker {what}", remedy
        return f"TLS: {words(error)}", "Check that the port is the broker's TLS port, and [broker.tls]."
    if isinstance(error, socket.gaierror):
        return f"no such host: {words(error)}", "Check `host` in [broker], and the name server."
    if isinstance(error, ConnectionRefusedError):
        return "connection refused", "Check that the broker runs, and `port` in [broker]."
    if isinstance(error, TimeoutError):
        return "no answer to the connection", "Check the network and `host` in [broker]."
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return "no route to the broker", "Check the network."
    return words(error), "Trying again."


def words(error: Exception) -> str:
    """What the system calls it."""
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)

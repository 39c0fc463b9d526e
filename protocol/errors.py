"""The tree of errors: one root, typed fields, and for a person what to do next."""

from __future__ import annotations


class OutriderError(Exception):
    """Root of every error that Outrider raises on purpose.

    what: one clause naming what is wrong, with the offending value.
    where: file, section, topic or session.
    remedy: what a person can do next.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}. {remedy}" if remedy else text)


class ConfigError(OutriderError):
    """A configuration that cannot be used; exits with EX_CONFIG so that a service manager does not retry."""

    exit_code = 78


class ModelError(OutriderError):
    """A model, tokenizer or manifest that is missing, corrupt, unsupported or does not match its counterpart."""

    exit_code = 66


class NumericsError(ModelError):
    """The configured numerics cannot be honoured on this machine."""


class LinkError(OutriderError):
    """The broker refused this client or cannot be reached."""

    exit_code = 69


class WireError(OutriderError):
    """A payload or topic that is not of the protocol, or outside its limits."""

    exit_code = 65


class SamplingError(OutriderError):
    """Logits from which no token can be chosen (NaN, or nothing above minus infinity)."""


class SessionError(OutriderError):
    """A session that ended without its text being complete.

    code: the verifier's error code (see `protocol.messages.ErrorCode`), or "" where the edge itself gave up; retry_s:
    when it may be asked again, where it said so.
    """

    def __init__(
        self, what: str, *, code: str = "", where: str = "", remedy: str = "", retry_s: float | None = None
    ) -> None:
        self.code, self.retry_s = code, retry_s
        super().__init__(what, where=where, remedy=remedy)

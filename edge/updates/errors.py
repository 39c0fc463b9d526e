"""Why a release is not taken: one class a reason, so that a fleet's logs can be counted."""

from __future__ import annotations

from protocol.errors import OutriderError


class UpdateError(OutriderError):
    """Root of what stops a release; what runs goes on running. where: the release, its file, or the store's file."""

    exit_code = 65


class FormatError(UpdateError):
    """Not a manifest of a format that this runtime reads."""


class SignatureError(UpdateError):
    """Not signed by a key that this board trusts."""


class ReplayError(UpdateError):
    """A serial number that is not above the last one of its channel and kind."""


class CompatibilityError(UpdateError):
    """For another channel, board, runtime or tokenizer."""


class RejectedError(UpdateError):
    """A release that this board has tried before and rolled back."""


class FetchError(UpdateError):
    """A file that could not be fetched whole; what came is kept, and asked for further on."""

    exit_code = 69


class DigestError(UpdateError):
    """A file that is not what the manifest says."""

    exit_code = 66


class DataCapError(UpdateError):
    """This month's bytes on a metered link are used up."""

    exit_code = 69


class SelfTestError(UpdateError):
    """A release that does not do on this board what it should."""

    exit_code = 66


class StoreError(UpdateError):
    """The store cannot be read or written: full, read-only, or broken."""

    exit_code = 74

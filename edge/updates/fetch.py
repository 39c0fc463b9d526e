"""Files over HTTPS, resumed where they broke off, with the standard library alone.

A `.part` is synced at each multiple of SYNC_BYTES before anything is written beyond it. So of a part that a power cut
has left, everything up to the last multiple below its size is sound, and is not fetched again.
"""

from __future__ import annotations

import http.client
import logging
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from edge.drafters.manifest import digest
from edge.updates.disk import Disk
from edge.updates.errors import DataCapError, DigestError, FetchError
from edge.updates.manifest import PART, File
from edge.updates.store import named

log = logging.getLogger(__name__)

SYNC_BYTES = 1 << 20
BLOCK_BYTES = 256 << 10
AGENT = "outrider-edge"


class Fetcher(Protocol):
    def fetch(self, disk: Disk, file: File, folder: Path, *, budget: int | None, more: Callable[[int], bool]) -> None:
        """Bring a file into `folder`, whole and durable but for its entry in the folder.

        budget: bytes that it may cost, None without a cap; more: told of bytes that came, says whether to go on.
        Raises FetchError, DataCapError, DigestError, StoreError; what came stays for the next time, but after a
        DigestError.
        """


class HttpsFetcher:
    """ca: PEM file of the authorities to trust, the system's when None; timeout_s: of a silent connection."""

    def __init__(self, ca: Path | None = None, timeout_s: float = 30.0) -> None:
        context = ssl.create_default_context(cafile=str(ca) if ca else None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _HttpsRedirects())
        self._timeout_s = timeout_s
        self._synced: dict[Path, int] = {}  # sizes of parts that this process has left, all of them sound

    def fetch(self, disk: Disk, file: File, folder: Path, *, budget: int | None, more: Callable[[int], bool]) -> None:
        """See `Fetcher.fetch`."""
        part = folder / (file.name + PART)
        have = self._sound(disk, part)
        resumed = have > 0
        while True:
            if budget is not None and file.size - have > budget:
                raise DataCapError(
                    f"{file.size - have} bytes are to come, {budget} are left this month",
                    where=file.url,
                    remedy="Raise `data_cap_mb`, or wait for the next month",
                )
            if have < file.size:
                self._receive(disk, file, part, have, more)
            with named(part):
                if digest(part) == file.sha256:
                    disk.sync(part)
                    disk.rename(part, file.name)
                    return
                disk.truncate(part, 0)
            if not resumed:
                raise DigestError(
                    f"{file.name} is not what the manifest says",
                    where=file.url,
                    remedy="Put the signed file there, and announce it by another release name",
                )
            log.warning("%s: the resumed file is not what the manifest says; once more from its beginning", file.url)
            have, resumed = 0, False

    def _sound(self, disk: Disk, part: Path) -> int:
        """Cut the part back to what is certain, and say how much that is; the file exists afterwards."""
        with named(part):
            if not part.exists():
                disk.write(part, b"")
                disk.sync(part.parent)
                return 0
            size = part.stat().st_size
            sound = max(0, size - 1) // SYNC_BYTES * SYNC_BYTES
            if self._synced.pop(part, None) == size:
                return size
            if sound < size:
                disk.truncate(part, sound)
            return sound

    def _receive(self, disk: Disk, file: File, part: Path, have: int, more: Callable[[int], bool]) -> None:
        try:
            self._stream(disk, file, part, have, more)
        except FetchError:
            with named(part):
                disk.sync(part)
                self._synced[part] = part.stat().st_size
            raise

    def _stream(self, disk: Disk, file: File, part: Path, have: int, more: Callable[[int], bool]) -> None:
        headers = {"User-Agent": AGENT, "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        try:
            with self._opener.open(urllib.request.Request(file.url, headers=headers), timeout=self._timeout_s) as reply:
                if have and not _continues(reply, have):
                    with named(part):
                        disk.truncate(part, 0)
                    have = 0
                while have < file.size:
                    until_sync = SYNC_BYTES - have % SYNC_BYTES
                    block = reply.read(min(BLOCK_BYTES, until_sync, file.size - have))
                    if not block:
                        raise FetchError(f"ended after {have} of {file.size} bytes", where=file.url)
                    have += len(block)
                    with named(part):
                        disk.append(part, block)
                        if have % SYNC_BYTES == 0:
                            disk.sync(part)
                    if not more(len(block)):
                        raise FetchError(f"put off after {have} of {file.size} bytes", where=file.url)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                with named(part):
                    disk.truncate(part, 0)
            raise FetchError(f"HTTP {error.code} {error.reason}", where=file.url) from error
        except urllib.error.URLError as error:
            raise FetchError(f"{error.reason}", where=file.url) from error
        except (OSError, http.client.HTTPException) as error:
            raise FetchError(f"{error or type(error).__name__}", where=file.url) from error


class _HttpsRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.startswith("https://"):
            raise urllib.error.URLError(f"redirected to {newurl[:200]}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _continues(reply: Any, have: int) -> bool:
    """Whether a reply goes on from where we are, rather than from the file's beginning."""
    match = re.match(r"bytes (\d+)-", reply.headers.get("Content-Range", ""))
    return reply.status == http.client.PARTIAL_CONTENT and match is not None and int(match[1]) == have

"""What a release must show before it is tried: in a process of its own, so that nothing it does stops the board.

`python -m edge.updates.selftest CONFIG MODEL` loads the drafter as the board would, lets it guess, and prints a
`Report` as JSON; a runtime's candidate is the one that runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from edge.config import EdgeConfig
from edge.drafters import golden, manifest
from edge.drafters.suffix import SuffixDrafter
from edge.loading import load_model, load_text
from edge.updates.boot import flashed_environment, runtime_environment
from edge.updates.errors import DigestError, SelfTestError
from edge.updates.manifest import AnyRelease, ModelRelease, RuntimeRelease, SettingsRelease, files
from edge.updates.settings import apply
from edge.updates.wheels import SITE
from link.command import package_version
from link.config import load
from protocol.errors import ModelError, OutriderError
from protocol.sampling import Sampling

TIMEOUT_S = 600.0
PROMPT = "Say hello."


class Report(msgspec.Struct, frozen=True):
    """version: of the runtime that wrote it; tokenizer_digest: of the drafter."""

    version: str
    tokenizer_digest: str


class SelfTest:
    """Tests releases for one board. config_path, config: its file, and what is in it; model: the one that runs now."""

    def __init__(self, config_path: Path, config: EdgeConfig, model: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self._config_path, self._config, self._model, self._timeout_s = config_path, config, model, timeout_s

    def __call__(self, release: AnyRelease, folder: Path) -> None:
        """Raises DigestError or SelfTestError for a release, installed in `folder`, that must not be tried."""
        check_files(release, folder)
        match release:
            case SettingsRelease():
                apply(self._config, release.settings)
            case ModelRelease():
                report = self._run(release, folder, dict(os.environ))
                if report.tokenizer_digest != release.tokenizer_digest:
                    raise SelfTestError(f"its tokenizer is {report.tokenizer_digest[:12]}", where=release.release)
            case RuntimeRelease():
                environ = runtime_environment(folder / SITE, folder.name, flashed_environment(os.environ))
                report = self._run(release, self._model, environ)
                if report.version != release.version:
                    raise SelfTestError(f"it calls itself {report.version}, not {release.version}", where=folder.name)

    def _run(self, release: AnyRelease, model: Path, environ: dict[str, str]) -> Report:
        command = [sys.executable, "-m", "edge.updates.selftest", str(self._config_path), str(model)]
        try:
            done = subprocess.run(command, capture_output=True, env=environ, timeout=self._timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise SelfTestError(f"no end within {self._timeout_s:g} s", where=release.release) from None
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise SelfTestError(
                f"ended with {done.returncode}: {said[-1] if said else 'no message'}", where=release.release
            )
        try:
            return msgspec.json.decode(done.stdout, type=Report)
        except msgspec.MsgspecError as error:
            raise SelfTestError(f"no report: {error}", where=release.release) from None


def check_files(release: AnyRelease, folder: Path) -> None:
    """Raises DigestError for a file that is not what the manifest says."""
    for file in files(release):
        try:
            found = manifest.digest(folder / file.name)
        except ModelError as error:
            raise DigestError(error.what, where=error.where) from None
        if found != file.sha256:
            raise DigestError(f"digest {found[:12]} is not {file.sha256[:12]}", where=str(folder / file.name))


def report_on(config: EdgeConfig) -> Report:
    """Load the drafter, and let a model guess what its manifest says that it must, and behind a text of our own.

    Raises ModelError, and SelfTestError for logits that are not finite.
    """
    drafter = load_model(config, beside_service=True)
    if isinstance(drafter, SuffixDrafter):
        return Report(package_version(), drafter.info.tokenizer_digest)
    expected = manifest.read(config.drafter.model, "drafter").golden
    if expected is not None:
        golden.check(drafter, expected, str(config.drafter.model))
    row = drafter.prefill(load_text(config).chat([{"role": "user", "content": PROMPT}]))
    for _ in range(golden.GUESSES):
        if not np.isfinite(drafter.logits(row)).all():
            raise SelfTestError(f"logits of position {row.position + 1} are not finite", where=drafter.info.name)
        (row,) = drafter.extend([(drafter.candidates(row, Sampling(), 1)[0].id, row)])
    return Report(package_version(), drafter.info.tokenizer_digest)


def main(config_path: str, model: str) -> int:
    """The tested process: prints its report, or the error that it would end the board with."""
    with suppress(OSError):  # where memory runs out, this process is what ends
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        config = load(Path(config_path), EdgeConfig)
        drafter = msgspec.structs.replace(config.drafter, model=Path(model), verify_weights=True)
        report = report_on(msgspec.structs.replace(config, drafter=drafter))
    except OutriderError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sys.stdout.buffer.write(msgspec.json.encode(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

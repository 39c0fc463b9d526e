"""One target under libFuzzer, in a process of its own: `python -m tests.fuzz.one TARGET [libFuzzer's arguments]`."""

from __future__ import annotations

import sys

import atheris

from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    target = TARGETS[sys.argv[1]]
    with atheris.instrument_imports(include=list(target.watched)):
        fuzz = target.load()
    atheris.Setup(sys.argv[1:], fuzz)
    atheris.Fuzz()

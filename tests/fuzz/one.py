"""One target under libFuzzer, in a process of its own: `python -m tests.fuzz.one TARGET [libFuzzer's arguments]`."""

from __future__ import annotations

import sys

import atheris

from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    with atheris.instrument_imports(include=list(TARGETS[name].watched)):
        fuzz = TARGETS[name].load()
    # To merge, libFuzzer has a shell run its own name again.
    atheris.Setup([f"{sys.executable} -m tests.fuzz.one {name}", *arguments], fuzz)
    atheris.Fuzz()

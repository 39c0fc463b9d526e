"""How the tools' commands end where something is wrong that a person can mend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from protocol.errors import OutriderError


@contextmanager
def reported(command: str) -> Iterator[None]:
    """Say an OutriderError in one line, as `command` says it, and end the process with its exit code."""
    try:
        yield
    except OutriderError as error:
        click.echo(f"{command}: {error}", err=True)
        sys.exit(error.exit_code)

"""What the commands of both sides share: how they end with an error, and which version they are."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

import click

from protocol.errors import OutriderError


class CommandGroup(click.Group):
    """Ends with an error's own exit code, its text on stderr behind the command's name."""

    def __init__(self, *arguments, command: str, **options) -> None:
        super().__init__(*arguments, **options)
        self._command = command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except OutriderError as error:
            click.echo(f"{self._command}: {error}", err=True)
            sys.exit(error.exit_code)


def package_version() -> str:
    """The installed package's version; "0" in a checkout that was not installed."""
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "0"

"""The drafter that a benchmark is given as a model: one of a pair, or any that can be exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tools import models
from tools.export import sources
from tools.export.sources import Source


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--pair and --model, for `read`."""
    for decorator in (
        click.option("--model", help="Another one: a directory, a hub id or a GGUF file, as `tools.export` takes it."),
        click.option("--pair", type=click.Choice(sorted(models.PAIRS)), help="The drafter of this pair, fetched once."),
    ):
        command = decorator(command)
    return command


def check(pair: str | None, model: str | None) -> None:
    """Raises UsageError where neither is given, or both are."""
    if (pair is None) == (model is None):
        raise click.UsageError("give --pair or --model")


def read(pair: str | None, model: str | None) -> Source:
    """Raises as `sources.read`."""
    return sources.read(model or str(models.fetch(models.PAIRS[str(pair)].drafter)))

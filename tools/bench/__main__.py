"""`python -m tools.bench NAME`: see `--help` of each."""

from __future__ import annotations

from importlib import import_module

import click

NAMES = ("board", "drafter", "fidelity", "law", "link", "overhead", "policy", "sensitivity", "suffix", "verifier")


class Benchmarks(click.Group):
    """Each benchmark is the `main` of its module, which is imported when it is asked for: some bring torch."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(NAMES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in NAMES:
            return None
        command: click.Command = import_module(f"tools.bench.{name}").main
        return command


@click.command(cls=Benchmarks)
def main() -> None:
    """Benchmarks; each prints one JSON record."""


if __name__ == "__main__":
    main()

"""Prompts by topic, and which of them a measurement keeps to itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol.errors import ConfigError

Split = Literal["calibration", "held-out"]

OWN = Path(__file__).resolve().parent.parent / "prompts" / "corpus.txt"
HELD_OUT_EVERY = 3  # topics


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    topic: str
    split: Split


def read(path: Path = OWN) -> list[Prompt]:
    """The prompts of a file: a line `# topic` opens a topic, every other line that is not empty is a prompt of it.

    Every third topic is held out, as a whole: what is measured on it was not seen in another wording.
    Raises ConfigError for a file that cannot be read, that holds nothing, or in which a topic or prompt comes twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path)) from error
    topics: list[str] = []
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        where = f"{path}, line {number}"
        if line.startswith("# "):
            if line[2:] in topics:
                raise ConfigError(f"the topic {line[2:]!r} is there already", where=where, remedy="put both together")
            topics.append(line[2:])
        elif line:
            if not topics:
                raise ConfigError("a prompt before the first topic", where=where, remedy="begin with a line '# topic'")
            if line in prompts:
                raise ConfigError("the prompt is there already", where=where, remedy="leave one out")
            split: Split = "calibration" if len(topics) % HELD_OUT_EVERY else "held-out"
            prompts[line] = Prompt(line, topics[-1], split)
    if not prompts:
        raise ConfigError("it holds no prompt", where=str(path), remedy="give one a line, below a line '# topic'")
    return list(prompts.values())

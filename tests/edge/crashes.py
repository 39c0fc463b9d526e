"""A disk that remembers what it was told, and every state in which a power cut may leave it.

What the model takes for granted, and nothing more: `sync` of a file makes its bytes durable, `sync` of a directory its
entries, a rename within a directory happens or does not, and what is durable stays. What was not synced may be there or
not, each operation on a directory by itself and in any combination, so also a rename without the creation before it. A
file that was written to and not synced holds what was durable, or any of what it held since, or a torn last write, or
zeros for it, or nothing at all if it was written anew. Not modelled: media that lie about a flush, bits that rot.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import TypeAlias

from edge.updates.disk import PosixDisk

Tree: TypeAlias = "dict[str, bytes | Tree]"
MOST_STATES = 96  # of one prefix; beyond that as many at random, with the extremes


class NoSyncDisk(PosixDisk):
    """The machine's, for what nobody pulls the plug on."""

    def sync(self, path: Path) -> None:
        assert path.exists()


class RecordingDisk(NoSyncDisk):
    """Does it all for real below `root`, and logs it with relative paths."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[tuple] = []

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self._note("make_directory", path)

    def write(self, path: Path, data: bytes) -> None:
        super().write(path, data)
        self._note("write", path, data)

    def append(self, path: Path, data: bytes) -> None:
        super().append(path, data)
        self._note("append", path, data)

    def truncate(self, path: Path, size: int) -> None:
        super().truncate(path, size)
        self._note("truncate", path, size)

    def rename(self, path: Path, name: str) -> None:
        assert "/" not in name
        super().rename(path, name)
        self._note("rename", path, name)

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._note("remove", path)

    def sync(self, path: Path) -> None:
        super().sync(path)
        if path != self.root.parent:
            self._note("sync", path)

    def _note(self, name: str, path: Path, *more: object) -> None:
        self.log.append((name, path.relative_to(self.root).parts, *more))


@dataclass(eq=False)
class File:
    durable: bytes = b""
    since: list[bytes] = field(default_factory=list)  # what it held after each write that was not synced

    @property
    def now(self) -> bytes:
        return self.since[-1] if self.since else self.durable

    def may_hold(self) -> list[bytes]:
        if not self.since:
            return [self.durable]
        before = self.since[-2] if len(self.since) > 1 else self.durable
        found = [self.durable, *self.since]
        if self.now.startswith(before):
            tail = len(self.now) - len(before)
            found += [self.now[: len(before) + tail // 2], before + bytes(tail)]
        return list(dict.fromkeys(found))


@dataclass(eq=False)
class Directory:
    durable: dict[str, File | Directory] = field(default_factory=dict)
    now: dict[str, File | Directory] = field(default_factory=dict)
    since: list[tuple[str | None, str | None, File | Directory | None]] = field(default_factory=list)

    def change(self, gone: str | None, made: str | None, node: File | Directory | None) -> None:
        self.since.append((gone, made, node))
        _apply(self.now, self.since[-1:])

    def may_hold(self) -> list[dict[str, File | Directory]]:
        found = []
        for size in range(len(self.since) + 1):
            for subset in combinations(self.since, size):
                entries = dict(self.durable)
                _apply(entries, subset)
                if entries not in found:
                    found.append(entries)
        return found


def _apply(entries: dict, changes) -> None:
    for gone, made, node in changes:
        if gone is not None:
            entries.pop(gone, None)
        if made is not None:
            entries[made] = node


class DiskModel:
    """Follows a log, and tells what may be left if the power goes now."""

    def __init__(self) -> None:
        self.root = Directory()

    def follow(self, name: str, parts: tuple[str, ...], *more) -> None:
        if not parts:
            if name == "sync":
                self.root.durable, self.root.since = dict(self.root.now), []
            return
        folder = self.root
        for part in parts[:-1]:
            found = folder.now[part]
            assert isinstance(found, Directory)
            folder = found
        last = parts[-1]
        node = folder.now.get(last)
        match name:
            case "make_directory":
                if node is None:
                    folder.change(None, last, Directory())
            case "write":
                if node is None:
                    node = File()
                    folder.change(None, last, node)
                node.since += [b"", more[0]]
            case "append":
                node.since.append(node.now + more[0])
            case "truncate":
                node.since.append(node.now[: more[0]])
            case "rename":
                folder.change(last, more[0], node)
            case "remove":
                folder.change(last, None, None)
            case "sync":
                node.durable, node.since = (dict(node.now) if isinstance(node, Directory) else node.now), []

    def after_power_cut(self, chance: random.Random) -> Iterator[Tree]:
        """Trees that may be found, each once; a sample where there are too many."""
        unsure: list[File | Directory] = []
        _unsure(self.root, unsure, set())
        choices = [node.may_hold() for node in unsure]
        count = 1
        for choice in choices:
            count *= len(choice)
        if count <= MOST_STATES:
            picked = product(*choices)
        else:
            picked = iter(
                [tuple(choice[0] for choice in choices), tuple(choice[-1] for choice in choices)]
                + [tuple(chance.choice(choice) for choice in choices) for _ in range(MOST_STATES)]
            )
        for pick in picked:
            yield _tree(self.root, dict(zip(map(id, unsure), pick, strict=True)))


def _unsure(node: File | Directory, found: list, seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if node.since:
        found.append(node)
    if isinstance(node, Directory):
        for below in [*node.durable.values(), *node.now.values(), *(made for _, _, made in node.since if made)]:
            _unsure(below, found, seen)


def _tree(node: Directory, picked: dict[int, object]) -> Tree:
    entries = picked.get(id(node), node.durable)
    assert isinstance(entries, dict)
    return {
        name: _tree(below, picked) if isinstance(below, Directory) else picked.get(id(below), below.durable)
        for name, below in sorted(entries.items())
    }


def materialise(tree: Tree, path: Path) -> None:
    """Put a tree on a real disk, whose `path` does not exist yet."""
    path.mkdir()
    for name, below in tree.items():
        if isinstance(below, bytes):
            (path / name).write_bytes(below)
        else:
            materialise(below, path / name)


def freeze(tree: Tree) -> tuple:
    return tuple((name, below if isinstance(below, bytes) else freeze(below)) for name, below in tree.items())

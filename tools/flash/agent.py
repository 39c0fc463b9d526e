"""What runs where the files go, with no more than Python's own library: it tells what is there, and writes.

On a running board it is started over ssh, its source on the command line: `python3 -c SOURCE VERB ROOT`. Standard input
has what the verb needs, standard output gets one JSON object. It also runs on Python 3.8. Paths are text, the board's
begin with "/".
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from typing import IO, Any

USER = "outrider"
UNIT = "outrider-edge.service"
REMOVED = "removed"  # the member of the stream that lists what goes, first of all; other names have a folder
PART = ".flash"  # ends the name of a file that is not whole yet


def inside(root: str, path: str) -> str:
    """Where an absolute path of the board lies in `root`, its folder's links followed as the board would."""
    todo = [part for part in os.path.dirname(path).split("/") if part]
    at: list[str] = []
    followed = 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            at = at[:-1]
            continue
        here = os.path.join(root, *at, part)
        if os.path.islink(here) and followed < 40:
            followed += 1
            target = os.readlink(here)
            at = [] if target.startswith("/") else at
            todo = [piece for piece in target.split("/") if piece not in ("", ".")] + todo
        else:
            at.append(part)
    return os.path.join(root, *at, os.path.basename(path))


def names(root: str, file: str) -> dict[str, int]:
    """{name: number} of /etc/passwd or /etc/group."""
    try:
        with open(inside(root, "/etc/" + file)) as lines:
            return {line.split(":")[0]: int(line.split(":")[2]) for line in lines if line.count(":") >= 3}
    except FileNotFoundError:
        return {}


def name_of(table: dict[str, int], number: int) -> str:
    return next((name for name, known in table.items() if known == number), str(number))


def probe(root: str) -> dict[str, Any]:
    """The board's interpreter, architecture and C library, and whether the service's user is there."""
    users = names(root, "passwd")
    found = {"user": USER in users, "root": os.geteuid() == 0}
    if root == "/":
        here = platform.machine()
        return dict(found, python=list(sys.version_info[:2]), machine=here, glibc=glibc(root, here))
    folder = inside(root, "/usr/bin/python3")
    version = os.path.basename(os.readlink(folder)) if os.path.islink(folder) else ""
    digits = version[len("python") :].split(".")
    known = len(digits) == 2 and all(digit.isdigit() for digit in digits)
    built_for = machine(root, version)
    python = [int(digit) for digit in digits] if known else None
    return dict(found, python=python, machine=built_for, glibc=glibc(root, built_for))


def machine(root: str, interpreter: str) -> str | None:
    """The architecture of an image's interpreter, from its ELF header; None where it cannot be told."""
    try:
        with open(inside(root, "/usr/bin/" + interpreter), "rb") as file:
            head = file.read(20)
    except OSError:
        return None
    known = {183: "aarch64", 62: "x86_64"}
    return known.get(int.from_bytes(head[18:20], "little")) if head[:4] == b"\x7fELF" else None


def glibc(root: str, machine: str | None) -> list[int] | None:
    """The version of the C library, from what it says of itself; None where it cannot be told."""
    try:
        with open(inside(root, "/lib/" + str(machine) + "-linux-gnu/libc.so.6"), "rb") as file:
            said = re.search(rb"stable release version (\d+)\.(\d+)", file.read())
    except OSError:
        return None
    return [int(said.group(1)), int(said.group(2))] if said else None


def facts(root: str) -> dict[str, Any]:
    """What is at each of `paths`, and at every path below `trees`."""
    asked = json.load(sys.stdin)
    users, groups = names(root, "passwd"), names(root, "group")
    paths = set(asked["paths"])
    for tree in asked["trees"]:
        top = inside(root, tree + "/x")[:-2]
        for folder, folders, files in os.walk(top):
            below = os.path.relpath(folder, top)
            paths.update(os.path.normpath(os.path.join(tree, below, name)) for name in folders + files)
    return {path: fact for path in paths if (fact := one_fact(inside(root, path), users, groups))}


def one_fact(path: str, users: dict[str, int], groups: dict[str, int]) -> dict[str, Any] | None:
    """kind, and of a file or folder mode and owner; content: a file's SHA-256, or what a link points to."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    owner = name_of(users, found.st_uid) + ":" + name_of(groups, found.st_gid)
    fact: dict[str, Any] = {"mode": stat.S_IMODE(found.st_mode), "owner": owner, "kind": "other"}
    if stat.S_ISLNK(found.st_mode):
        return {"kind": "link", "content": os.readlink(path)}
    if stat.S_ISDIR(found.st_mode):
        fact["kind"] = "folder"
    elif stat.S_ISREG(found.st_mode):
        total = hashlib.sha256()
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                total.update(block)
        fact.update(kind="file", content=total.hexdigest())
    return fact


def apply(root: str) -> dict[str, Any]:
    """Take a tar stream: its first member is a JSON list of paths to remove, the rest is written as it says."""
    if USER not in names(root, "passwd"):
        add_user(root)
    users, groups = names(root, "passwd"), names(root, "group")
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as stream:
        for member in stream:
            if member.name == REMOVED:
                for path in json.load(content(stream, member)):
                    remove(inside(root, path))
                continue
            path = inside(root, "/" + member.name)
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            write(stream, member, path, users[member.uname], groups[member.gname])
    os.sync()
    return {}


def add_user(root: str) -> None:
    command = ["useradd", "--system", "--user-group", "--no-create-home"]
    command += ["--home-dir", "/var/lib/" + USER, "--shell", "/usr/sbin/nologin"]
    where = [] if root == "/" else ["--prefix", root]
    done = subprocess.run([*command, *where, USER], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise OSError(f"cannot add the user {USER}: {done.stderr.strip()}")


def remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def write(stream: tarfile.TarFile, member: tarfile.TarInfo, path: str, uid: int, gid: int) -> None:
    """A file or link takes its name when it is whole, so that who reads it meanwhile has the old one."""
    if member.isdir():
        if os.path.lexists(path) and not os.path.isdir(path):
            os.remove(path)
        os.makedirs(path, exist_ok=True)
        part = path
    else:
        part = path + PART
        remove(part)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
    if member.issym():
        os.symlink(member.linkname, part)
    else:
        if member.isreg():
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                shutil.copyfileobj(content(stream, member), file, 1 << 20)
        os.chown(part, uid, gid)
        os.chmod(part, member.mode)
    if part != path:
        os.rename(part, path)


def content(stream: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    found = stream.extractfile(member)
    assert found is not None
    return found


def start(root: str) -> dict[str, Any]:
    """Let systemd read the unit anew and start it with all that is new."""
    for command in (["daemon-reload"], ["reset-failed", UNIT], ["restart", "--no-block", UNIT]):
        done = subprocess.run(["systemctl", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode and command[0] != "reset-failed":
            raise OSError(f"systemctl {command[0]}: {done.stderr.strip()}")
    return {}


if __name__ == "__main__":
    verb, at = sys.argv[1:]
    os.umask(0o022)
    try:
        json.dump({"probe": probe, "facts": facts, "apply": apply, "start": start}[verb](at), sys.stdout)
    except (OSError, tarfile.TarError, KeyError) as error:
        sys.exit(f"{verb}: {error}")

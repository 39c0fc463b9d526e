"""The board's library comes with a wheel, or is compiled once where it is wanted, or is done without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from native import board, compiling
from tools.flash.wheels import copy_source

CROSS = "aarch64-linux-gnu-gcc"
AARCH64 = 183  # e_machine of its ELF files

needs_compiler = pytest.mark.skipif(compiling.compiler() is None, reason="no C compiler")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing that the environment asks for."""
    for name in ("OUTRIDER_NATIVE", "OUTRIDER_REQUIRE_NATIVE", "OUTRIDER_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(board, "load", load)  # for `find`: what this process has loaded already is not what is asked
    return tmp_path / "outrider"


load, find = board.load.__wrapped__, board.find.__wrapped__


@needs_compiler
def test_it_is_compiled_once_and_leaves_nothing_else(fresh: Path) -> None:
    ffi, lib = load()
    [made] = fresh.iterdir()
    at = made.stat().st_mtime_ns
    load()
    assert [made] == list(fresh.iterdir()) and made.stat().st_mtime_ns == at
    assert ffi.string(lib.board_isa()).decode() in ("scalar", "avx2", "avx512", "neon", "dotprod")


@needs_compiler
def test_another_source_or_another_flag_is_another_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    monkeypatch.setenv("OUTRIDER_CFLAGS", "-DANOTHER")
    load()
    monkeypatch.setattr(board, "sources", lambda: [*board.FOLDER.glob("[ei]*.c"), extra])
    extra = fresh / "extra.c"
    extra.write_text("int extra(void);\nint extra(void) { return 1; }\n")
    load()
    assert len(list(fresh.glob("*.so"))) == 3


@needs_compiler
def test_the_sources_have_no_warnings(tmp_path: Path) -> None:
    command = [*(compiling.compiler() or []), "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    compiling.build(command, board.sources(), board.FLAGS, tmp_path / "board.so")


def test_without_it_the_twins_do_the_work_and_who_needs_it_is_told_why(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(board, "SHIPPED", fresh / "none.so")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert find() is None
    with pytest.raises(board.NativeError, match="nor a compiler"):
        load()
    monkeypatch.setenv("OUTRIDER_REQUIRE_NATIVE", "1")
    with pytest.raises(board.NativeError):
        find()


def test_it_can_be_left_out(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE", "0")
    assert find() is None and not fresh.exists()


@needs_compiler
def test_what_does_not_compile_is_told(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CFLAGS", "-no-such-flag-of-any-compiler")
    with pytest.raises(board.NativeError, match="no-such-flag"):
        load()
    assert not list(fresh.iterdir()), "nothing is left behind"


@needs_compiler
def test_what_came_with_the_package_and_does_not_fit_is_compiled_anew(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = tmp_path / "_board.so"
    shipped.write_bytes(b"\x7fELF of another machine")
    monkeypatch.setattr(board, "SHIPPED", shipped)
    load()
    assert "cannot be used" in caplog.text
    assert len(list(fresh.iterdir())) == 1


@needs_compiler
def test_an_instruction_set_that_is_not_here_is_an_error_even_where_the_library_may_be_absent(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_ISA", "mmx")
    with pytest.raises(board.NativeError, match="mmx"):
        find()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_source(tmp_path_factory.mktemp("source") / "checkout")


def wheel(source: Path, out: Path, **environment: str) -> zipfile.ZipFile:
    pytest.importorskip("setuptools", minversion="77")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out)]
    done = subprocess.run([*pip, str(source)], env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [made] = out.iterdir()
    return zipfile.ZipFile(made)


@needs_compiler
def test_a_wheel_brings_the_library_for_its_platform_and_no_compiler_is_asked_for(
    source: Path, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = wheel(source, tmp_path / "wheels")
    assert Path(made.filename or "").stem.endswith("py3-none-" + compiling.platform(compiling.compiler() or []))
    made.extract("native/board/_board.so", tmp_path)
    monkeypatch.setattr(board, "SHIPPED", tmp_path / "native/board/_board.so")
    monkeypatch.setenv("CC", "no-such-compiler")
    load()


def test_a_machine_without_a_compiler_makes_a_wheel_of_sources_for_all(source: Path, tmp_path: Path) -> None:
    stale = source / "build/lib/native/board/_board.so"
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.write_bytes(b"of another machine")
    made = wheel(source, tmp_path, CC="no-such-compiler")
    assert Path(made.filename or "").stem.endswith("py3-none-any")
    names = {name for name in made.namelist() if name.startswith("native/board/")}
    assert names == {f"native/board/{path.name}" for path in board.FOLDER.glob("*.[ch]")} | {"native/board/__init__.py"}


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS}")
def test_a_cross_compiler_makes_the_wheel_of_another_board(source: Path, tmp_path: Path) -> None:
    made = wheel(source, tmp_path, CC=CROSS)
    assert Path(made.filename or "").stem.endswith("py3-none-linux_aarch64")
    assert int.from_bytes(made.read("native/board/_board.so")[18:20], "little") == AARCH64

"""Commissioning: what is refused beforehand, what the configuration becomes, and enrolment that may be interrupted."""

from __future__ import annotations

import os
import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from edge.config import EdgeConfig
from edge.enroll import IdentityError
from link.config import TlsConfig, load
from protocol.errors import ConfigError
from tests.tools.provisioning import provision
from tools.boards import FOLDER, NAMES, SHORT
from tools.commission import identity
from tools.commission.__main__ import main
from tools.commission.settings import settings
from tools.flash.places import CommandError, Place, image
from tools.flash.plan import IDENTITY
from tools.models import ROOT
from tools.provision.folder import Folder

NOW = datetime.now(timezone.utc).replace(microsecond=0)
DEVICE = "acme.kitchen"
needs_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="entering a root needs root")


# -- the configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_each_board_s_file_is_filled_in_and_keeps_all_else(name, tmp_path):
    path = tmp_path / "edge.toml"
    path.write_text(settings(name, DEVICE, "broker.acme.example", 443))
    made, base = load(path, EdgeConfig), load(FOLDER / f"{SHORT.get(name, name)}.toml", EdgeConfig)
    assert (made.device.name, made.broker.host, made.broker.port) == (DEVICE, "broker.acme.example", 443)
    assert made.broker.tls == TlsConfig(
        ca=Path(IDENTITY, "ca.pem"), cert=Path(IDENTITY, "board.pem"), key=Path(IDENTITY, "board.key")
    )
    assert msgspec.structs.replace(made, device=base.device, broker=base.broker) == base


# -- what is refused --------------------------------------------------------------------------------------------------


def commission(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def given(tmp_path) -> list[object]:
    """Options that are good but for the root, which is no Debian."""
    (tmp_path / "model").mkdir()
    (tmp_path / "root" / "home").mkdir(parents=True)
    told = ["--root", tmp_path / "root", "--hardware", "pi5", "--broker", "broker.example", "--model"]
    return [*told, tmp_path / "model"]


def test_a_name_that_is_no_board_s_is_refused(given):
    done = commission("kitchen", *given, "--later")
    assert done.exit_code == 65 and "kitchen" in done.output


def test_a_model_that_is_none_is_refused_before_anything_is_made(given, tmp_path):
    done = commission(DEVICE, *given, "--later", "--yes")
    assert done.exit_code in (66, 78) and not any((tmp_path / "root" / "home").iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ssh", "kitchen"], "either --root or --ssh"),
        (["--request", "r", "--later"], "one of --request, --answer, --later"),
        (["--config", __file__], "Give either --config"),
        (["--broker", "host:port"], "HOST:PORT"),
    ],
)
def test_options_that_exclude_each_other_are_named(given, words, says):
    if os.geteuid() != 0:
        pytest.skip("root is asked for first")
    done = commission(DEVICE, *given, *words)
    assert done.exit_code == 2 and says in done.output


@needs_root
def test_a_folder_that_is_no_debian_is_refused(smollm2, given):
    done = commission(DEVICE, *given[:-1], smollm2[0], "--later", "--dry-run")
    assert done.exit_code == ConfigError.exit_code
    assert "/etc/debian_version" in done.output and "--debian" in done.output


@needs_root
def test_the_list_says_each_step_and_does_none(smollm2, given, tmp_path):
    empty = tmp_path / "empty"
    words = ["--root", empty, "--debian", "bookworm", "--dry-run"]
    assert provision(tmp_path / "ca", "init", "test").exit_code == 0
    done = commission(DEVICE, *given[:-1], smollm2[0], *words, "--ca", tmp_path / "ca")
    assert done.exit_code == 0, done.output
    assert [line.split()[1] for line in done.output.splitlines()] == [
        "root", "packages", "wheels", "flash", "identity", "check",
    ]  # fmt: skip
    assert not empty.exists()


@needs_root
def test_a_root_of_another_architecture_is_named_with_what_it_takes(tmp_path):
    root = tmp_path / "root"
    for folder in ("dev", "sys", "proc", "run", "tmp", "bin"):
        (root / folder).mkdir(parents=True)
    for name in ("sh", "readlink"):
        foreign = root / "bin" / name
        foreign.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xff\xfe" + bytes(100))
        foreign.chmod(0o755)
    with pytest.raises(ConfigError, match=r"do not run on this machine.*--ssh.*qemu-user-static"):
        image(root).run(["true"])
    assert not any((root / "proc").iterdir()), "nothing stays mounted"


# -- enrolment --------------------------------------------------------------------------------------------------------


class Desk:
    """An authority, and a board whose commands run here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Folder(folder / "ca")
        assert provision(self.ca.path, "init", "test").exit_code == 0
        self.home = folder / "board"
        self.new_board()

    def new_board(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir()
        config = self.home / "edge.toml"
        config.write_text(settings("generic-x86", DEVICE, "broker").replace(IDENTITY, str(self.home / "id")))
        self.tls = load(config, EdgeConfig).broker.tls

        def enter(command: list[str], user: str) -> list[str]:
            program, *arguments = command
            if not program.endswith("outrider-edge"):
                return command
            python = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from edge.cli import main; main()"
            return [sys.executable, "-c", python, *arguments, "--config", str(config)]

        self.place = Place("the board", lambda arguments: [], enter, "/", running=False)

    def answer(self, **options: bool) -> bytes:
        assert self.tls is not None
        return identity.answer(self.place, DEVICE, self.tls, self.ca, NOW, **options)

    def install(self, answer: bytes) -> bool:
        assert self.tls is not None
        return identity.install(self.place, self.tls, answer)[1]

    @property
    def certificate(self) -> bytes:
        return (self.home / "id" / "board.pem").read_bytes()


@pytest.fixture
def desk(tmp_path) -> Desk:
    return Desk(tmp_path)


def test_a_board_is_enrolled_once_however_often_it_is_asked(desk):
    assert desk.install(desk.answer())
    first = desk.certificate
    assert not desk.install(desk.answer()), "and its service need not be started anew"
    assert desk.certificate == first


def test_an_enrolment_that_was_cut_short_goes_on_with_what_was_signed(desk):
    signed = desk.answer()
    again = desk.answer()  # the answer was lost
    assert again == signed and desk.install(again)


def test_a_request_that_never_arrived_is_made_again(desk):
    provision(desk.ca.path, "add", "kitchen", "--tenant", "acme")  # somebody's code waits
    assert desk.install(desk.answer())


def test_a_new_board_under_the_name_of_another_needs_a_word(desk):
    desk.install(desk.answer())
    first = desk.certificate
    desk.new_board()
    with pytest.raises(IdentityError, match=r"a key that this board does not have.*--again"):
        desk.answer()
    assert desk.install(desk.answer(again=True)) and desk.certificate != first


def test_a_revoked_board_needs_a_word(desk):
    desk.install(desk.answer())
    provision(desk.ca.path, "revoke", DEVICE)
    with pytest.raises(IdentityError, match="is revoked"):
        desk.answer()
    assert desk.install(desk.answer(again=True))


def test_what_the_board_refuses_ends_with_the_board_s_own_words_and_code(desk):
    answer = desk.answer()
    (desk.home / "id" / "board.key").unlink()
    with pytest.raises(CommandError, match=r"board\.key: cannot be read") as caught:
        desk.install(answer)
    assert caught.value.exit_code == 74

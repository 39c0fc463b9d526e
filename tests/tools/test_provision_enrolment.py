"""A board asks, the authority signs: what it takes, what it refuses, and what the board accepts back."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edge.cli import main as edge_cli
from edge.enroll import (
    Answer,
    FileError,
    IdentityError,
    Request,
    board_key,
    check_answer,
    code_key,
    make_request,
    proof,
    read,
)
from protocol.errors import WireError
from tests.tools.provisioning import DAY, LIFE, NOW, BoardFiles, code_for, enrol, made, tree
from tools.provision import office
from tools.provision.folder import Folder

DEVICE = "acme.kitchen"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return made(tmp_path / "ca")


@pytest.fixture
def board(tmp_path: Path) -> BoardFiles:
    return BoardFiles(tmp_path / "board", DEVICE)


def key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def sign(folder: Folder, request: bytes, now: datetime = NOW) -> bytes:
    return office.sign(folder, request, "request.json", now, LIFE)[0]


def certificate_of(answer: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(read(answer, Answer, "answer").certificate.encode())


def test_a_board_is_enrolled(tmp_path: Path, board: BoardFiles) -> None:
    folder = Folder(tmp_path / "ca")
    now = datetime.now(timezone.utc)
    office.init(folder, "test", now)
    folder.finish()
    answer = enrol(folder, DEVICE, board.ask(code_for(folder, DEVICE, now)), now)
    result = board.install(answer)
    assert result.exit_code == 0 and "acme.kitchen: enrolled until" in result.output
    certificate = x509.load_pem_x509_certificate(board.cert.read_bytes())
    assert certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == DEVICE
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_the_key_is_made_once_is_its_owner_s_alone_and_does_not_travel(folder: Folder, board: BoardFiles) -> None:
    code = code_for(folder, DEVICE)
    first = board.ask(code)
    private = board.key.read_bytes()
    assert board.key.stat().st_mode & 0o777 == 0o600
    second = board.ask(code)
    assert board.key.read_bytes() == private
    body = private.decode().splitlines()[1]
    assert body not in first.decode() and body not in second.decode()


def test_the_same_request_gets_the_same_answer(folder: Folder, board: BoardFiles) -> None:
    request = board.ask(code_for(folder, DEVICE))
    first = enrol(folder, DEVICE, request)
    before = tree(folder.path)
    assert enrol(folder, DEVICE, request) == first
    assert tree(folder.path) == before


def test_a_code_is_good_for_one_key(folder: Folder) -> None:
    code = code_for(folder, DEVICE)
    enrol(folder, DEVICE, make_request(DEVICE, key(), code))
    with pytest.raises(IdentityError, match="used for another key"):
        sign(folder, make_request(DEVICE, key(), code))


def test_a_code_ends(folder: Folder) -> None:
    request = make_request(DEVICE, key(), code_for(folder, DEVICE))
    with pytest.raises(IdentityError, match="its code ended 2026-03-08"):
        sign(folder, request, NOW + 7 * DAY)
    assert sign(folder, request, NOW + 6 * DAY)


def test_a_new_code_ends_the_old_one(folder: Folder) -> None:
    old = code_for(folder, DEVICE)
    new = code_for(folder, DEVICE, again=True)
    with pytest.raises(IdentityError, match="not made with this board's code"):
        sign(folder, make_request(DEVICE, key(), old))
    assert sign(folder, make_request(DEVICE, key(), new))


def test_a_code_may_be_typed_as_a_person_reads_it(folder: Folder) -> None:
    code = code_for(folder, DEVICE)
    typed = code.lower().replace("-", " ").replace("0", "o").replace("1", "l")
    assert sign(folder, make_request(DEVICE, key(), typed))


@pytest.mark.parametrize("code", ["", "  "])
def test_no_code_is_said_on_the_board(code: str) -> None:
    with pytest.raises(IdentityError, match="no enrolment code"):
        make_request(DEVICE, key(), code)


def test_another_board_s_code_opens_nothing(folder: Folder) -> None:
    code_for(folder, DEVICE)
    other = code_for(folder, "umbrella.lab")
    with pytest.raises(IdentityError, match="not made with this board's code"):
        sign(folder, make_request(DEVICE, key(), other))


def test_a_board_that_nobody_added_is_refused(folder: Folder) -> None:
    with pytest.raises(IdentityError, match="was never added"):
        sign(folder, make_request(DEVICE, key(), "00000-00000-00000-00000"))


def changed(data: bytes, **fields: object) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(read(data, Request, ""), **fields))


def test_a_request_under_another_name_is_refused(folder: Folder) -> None:
    """Somebody on the way writes another board's name over it."""
    request = make_request(DEVICE, key(), code_for(folder, DEVICE))
    code_for(folder, "acme.hall")
    with pytest.raises(IdentityError, match="under its own name"):
        sign(folder, changed(request, device="acme.hall"))


def test_a_key_that_was_put_in_on_the_way_is_refused(folder: Folder) -> None:
    request = make_request(DEVICE, key(), code_for(folder, DEVICE))
    thief = read(make_request(DEVICE, key(), "guess"), Request, "")
    with pytest.raises(IdentityError, match="not made with this board's code"):
        sign(folder, changed(request, csr=thief.csr))


def test_a_request_whose_signature_is_not_its_key_s_is_refused(folder: Folder) -> None:
    """The right code with another's public key: without proof of the private one it names nobody."""
    code = code_for(folder, DEVICE)
    der = bytearray(request_of(key(), DEVICE).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    broken = x509.load_der_x509_csr(bytes(der))
    with pytest.raises(IdentityError, match="not signed by its own key"):
        sign(folder, with_proof(broken, code))


def request_of(private, name: str) -> x509.CertificateSigningRequest:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return x509.CertificateSigningRequestBuilder().subject_name(subject).sign(private, hashes.SHA256())


def with_proof(csr: x509.CertificateSigningRequest, code: str) -> bytes:
    pem = csr.public_bytes(serialization.Encoding.PEM).decode()
    return msgspec.json.encode(
        Request(version=1, device=DEVICE, csr=pem, proof=proof(code_key(DEVICE, code), csr)),
    )


def test_a_name_in_the_request_gets_no_certificate_but_the_board_s_own(folder: Folder) -> None:
    with pytest.raises(IdentityError, match="under its own name"):
        sign(folder, with_proof(request_of(key(), "verifier"), code_for(folder, DEVICE)))


def test_another_kind_of_key_is_refused(folder: Folder) -> None:
    private = rsa.generate_private_key(65537, 2048)
    with pytest.raises(IdentityError, match="not ECDSA P-256"):
        sign(folder, with_proof(request_of(private, DEVICE), code_for(folder, DEVICE)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"version": 1}',
        b'{"version": 1, "device": "acme.kitchen", "csr": "", "proof": "", "more": 1}',
        b'{"version": 2, "device": "acme.kitchen", "csr": "", "proof": ""}',
        b'{"version": 1, "device": "../acme", "csr": "", "proof": ""}',
    ],
)
def test_what_is_no_request_is_named(folder: Folder, data: bytes) -> None:
    with pytest.raises(WireError):
        sign(folder, data)


def test_a_request_without_a_readable_csr_is_named(folder: Folder) -> None:
    code_for(folder, DEVICE)
    with pytest.raises(WireError, match="`csr` is none"):
        sign(folder, b'{"version": 1, "device": "acme.kitchen", "csr": "x", "proof": ""}')


def test_enrolling_anew_revokes_what_the_board_had(folder: Folder) -> None:
    first = certificate_of(enrol(folder, DEVICE, make_request(DEVICE, key(), code_for(folder, DEVICE))))
    later = NOW + DAY
    second = certificate_of(
        enrol(folder, DEVICE, make_request(DEVICE, key(), code_for(folder, DEVICE, later, again=True)), later)
    )
    listed = x509.load_pem_x509_crl((folder.path / "crl.pem").read_bytes())
    assert listed.get_revoked_certificate_by_serial_number(first.serial_number) is not None
    assert listed.get_revoked_certificate_by_serial_number(second.serial_number) is None
    assert DEVICE not in office.access(folder, later)


# What the board accepts back.


def answered(folder: Folder, private: ec.EllipticCurvePrivateKey, device: str = DEVICE) -> Answer:
    return read(enrol(folder, device, make_request(device, private, code_for(folder, device))), Answer, "")


def test_the_dates_are_held_against_the_board_s_clock(folder: Folder) -> None:
    private = key()
    answer = answered(folder, private)
    assert check_answer(answer, DEVICE, private, NOW) == NOW + LIFE
    with pytest.raises(IdentityError, match=r"the clock says 1970-01-01 00:00 UTC.* The clock is wrong"):
        check_answer(answer, DEVICE, private, datetime(1970, 1, 1, tzinfo=timezone.utc))
    with pytest.raises(IdentityError, match="the certificate ended 2028-02-29"):
        check_answer(answer, DEVICE, private, NOW + LIFE + DAY)


def test_a_clock_that_is_a_little_behind_is_no_hindrance(folder: Folder) -> None:
    private = key()
    assert check_answer(answered(folder, private), DEVICE, private, NOW - DAY / 48)


def test_another_board_s_answer_is_refused(folder: Folder) -> None:
    private = key()
    with pytest.raises(IdentityError, match=r"is for acme\.hall, this board is acme\.kitchen"):
        check_answer(answered(folder, private, "acme.hall"), DEVICE, private, NOW)


def test_an_answer_for_another_key_is_refused(folder: Folder) -> None:
    with pytest.raises(IdentityError, match="for another key"):
        check_answer(answered(folder, key()), DEVICE, key(), NOW)


def test_an_answer_with_another_authority_in_it_is_refused(tmp_path: Path, folder: Folder) -> None:
    """Whoever swaps the authority could pose as the broker."""
    private = key()
    other = (made(tmp_path / "other").path / "ca.pem").read_text()
    with pytest.raises(IdentityError, match="not one of the authority"):
        check_answer(msgspec.structs.replace(answered(folder, private), chain=other), DEVICE, private, NOW)


def test_a_refused_answer_leaves_the_board_as_it_was(folder: Folder, board: BoardFiles) -> None:
    board.ask(code_for(folder, DEVICE))
    before = tree(board.home / "id")
    result = board.install(enrol(folder, DEVICE, make_request(DEVICE, key(), code_for(folder, DEVICE, again=True))))
    assert result.exit_code == 77 and "outrider-edge: " in result.output
    assert tree(board.home / "id") == before


def test_a_board_without_a_place_for_its_identity_is_told_what_to_write(board: BoardFiles) -> None:
    board.config.write_text(board.config.read_text().replace("[broker.tls]", "[broker]").split("ca =")[0])
    result = board.install(b"{}")
    assert result.exit_code == 78 and 'cert = "board.pem"' in result.output


def test_a_key_that_is_none_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_text("precious")
    with pytest.raises(IdentityError, match="not a private key"):
        board_key(path)
    assert path.read_text() == "precious"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be"):
        board_key(tmp_path / "file" / "key.pem")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write for others")
def test_what_root_makes_in_another_user_s_folder_is_that_user_s(board: BoardFiles) -> None:
    """An administrator enrols the board, and the service, which is another user, has to read the key."""
    os.chown(board.home, 12345, 12346)
    board.ask("any code")
    for path in (board.key, board.key.parent):
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)


def test_request_and_answer_may_go_through_pipes(folder: Folder, board: BoardFiles) -> None:
    code = code_for(folder, board.device)
    asked = CliRunner().invoke(edge_cli, ["enroll", "--config", str(board.config), "--request", "-"], input=code)
    answer = enrol(folder, board.device, asked.stdout_bytes)
    done = CliRunner().invoke(edge_cli, ["enroll", "--config", str(board.config), "--answer", "-"], input=answer)
    assert done.exit_code == 0, done.output
    assert board.cert.exists()

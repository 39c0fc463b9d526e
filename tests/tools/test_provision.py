"""`python -m tools.provision` as scripts use it: what it writes, what it leaves alone, how it ends."""

from __future__ import annotations

import threading
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from edge.enroll import Answer, FileError, IdentityError, make_request, read
from tests.tools.provisioning import DAY, LIFE, NOW, BoardFiles, code_for, enrol, made, provision, tree
from tools.provision import office
from tools.provision.authority import LIST_LIFE
from tools.provision.folder import Folder, MissingError

DEVICE = "acme.kitchen"
BROKER = ("broker-config", "broker.example", "10.0.0.1", "--state", "/var/lib/mosquitto")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return made(tmp_path / "ca")


def key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def enrolled(folder: Folder, device: str, now: datetime = NOW) -> x509.Certificate:
    answer = enrol(folder, device, make_request(device, key(), code_for(folder, device, now, again=True)), now)
    return certificate_of(answer)


def certificate_of(answer: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(read(answer, Answer, "answer").certificate.encode())


def state(folder: Folder, name: str, now: datetime = NOW) -> str:
    return next(line.state for line in office.inventory(folder, now) if line.name == name)


def listed(path: Path, certificate: x509.Certificate) -> bool:
    revocations = x509.load_pem_x509_crl(path.read_bytes())
    return revocations.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None


@pytest.fixture
def commands(tmp_path: Path) -> list[tuple[object, ...]]:
    """Each that writes, in an order in which each has what it needs."""
    board = BoardFiles(tmp_path / "board", DEVICE)
    ca = tmp_path / "made" / "ca"
    for words in (("init", "test"), ("add", "kitchen", "--tenant", "acme", "--code-file", tmp_path / "code")):
        assert provision(ca, *words).exit_code == 0
    board.ask((tmp_path / "code").read_text())
    out = tmp_path / "made"
    return [
        ("init", "test"),
        ("add", "hall", "--tenant", "acme", "--code-file", out / "code"),
        ("sign", board.request_path, "--out", out / "answer.json"),
        ("renew", DEVICE, "--out", out / "renewed"),
        ("issue", "verifier", "gpu-1", "--out", out / "verifier"),
        (*BROKER, "--out", out / "broker"),
        ("acl", "--out", out / "acl"),
        ("revoke", DEVICE),
    ]


def test_a_rehearsal_writes_nothing(tmp_path: Path, commands: list[tuple[object, ...]]) -> None:
    for words in commands:
        before = tree(tmp_path)
        result = provision(tmp_path / "made" / "ca", *words, "--dry-run")
        assert result.exit_code == 0, result.output
        assert tree(tmp_path) == before, words
        assert provision(tmp_path / "made" / "ca", *words).exit_code == 0
        changed = {name for name, content in tree(tmp_path).items() if before.get(name) != content}
        announced = [line.split("/made/")[-1] for line in result.output.splitlines() if line.startswith("would write")]
        fresh = {name for name in changed if "/issued/" not in name}
        assert fresh == {f"made/{name}" for name in announced if "/issued/" not in name}, words


def test_a_second_run_changes_nothing(tmp_path: Path, commands: list[tuple[object, ...]]) -> None:
    for words in commands:
        assert provision(tmp_path / "made" / "ca", *words).exit_code == 0
        before = tree(tmp_path)
        assert provision(tmp_path / "made" / "ca", *words).exit_code == 0
        assert tree(tmp_path) == before, words


def test_a_rehearsed_init_makes_no_folder(tmp_path: Path) -> None:
    assert provision(tmp_path / "ca", "init", "test", "--dry-run").exit_code == 0
    assert not (tmp_path / "ca").exists()


def test_the_folder_is_its_owner_s_alone_and_holds_no_code(folder: Folder) -> None:
    code = code_for(folder, DEVICE)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    for name in ("ca.key", "register.json"):
        assert (folder.path / name).stat().st_mode & 0o777 == 0o600
    assert all(code.encode() not in content for content, _ in tree(folder.path).values())


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (("init", "a fleet"), 65, "fleet 'a fleet' is not"),
        (("init", "other"), 73, "is the authority of 'test'"),
        (("add", "kit.chen", "--tenant", "acme"), 65, "board 'kit.chen' is not"),
        (("add", "kitchen", "--tenant", "a/b"), 65, "tenant 'a/b' is not"),
        (("sign", "absent.json", "--out", "x"), 66, "no such file"),
        (("renew", "acme.absent", "--out", "x"), 66, "no board 'acme.absent'"),
        (("revoke", "acme.absent"), 66, "no board 'acme.absent'"),
        (("revoke", "absent", "--role", "verifier"), 66, "no verifier 'absent'"),
        (("issue", "verifier", "a b", "--out", "x"), 65, "verifier 'a b' is not"),
        (("broker-config", "h", "--out", "x", "--websockets-port", "443"), 78, "--port 443"),
        (("add", "kitchen"), 2, "--tenant"),
    ],
)
def test_each_mistake_has_its_exit_code_and_its_words(
    folder: Folder, words: tuple[str, ...], exit_code: int, said: str
) -> None:
    before = tree(folder.path)
    result = provision(folder.path, *words)
    assert (result.exit_code, said in result.output) == (exit_code, True), result.output
    assert tree(folder.path) == before


def test_without_an_authority_it_says_how_to_make_one(tmp_path: Path) -> None:
    result = provision(tmp_path / "ca", "inventory")
    assert result.exit_code == 66 and "tools.provision init" in result.output


def test_a_damaged_register_is_named(folder: Folder) -> None:
    path = folder.path / "register.json"
    path.write_bytes(path.read_bytes()[:-20])
    result = provision(folder.path, "inventory")
    assert result.exit_code == 74 and "register.json: is damaged" in result.output


def test_what_could_not_be_written_is_made_up_for_by_the_next_run(tmp_path: Path, folder: Folder) -> None:
    """The register knew of the certificate before the answer failed: the code is spent, and gives the same again."""
    request = tmp_path / "request.json"
    request.write_bytes(make_request(DEVICE, key(), code_for(folder, DEVICE, datetime.now(NOW.tzinfo))))
    (tmp_path / "file").write_text("")
    assert provision(folder.path, "sign", request, "--out", tmp_path / "file" / "answer").exit_code == 74
    serial = next(line.serial for line in office.inventory(folder, NOW))
    assert provision(folder.path, "sign", request, "--out", tmp_path / "answer").exit_code == 0
    assert f"{certificate_of((tmp_path / 'answer').read_bytes()).serial_number:x}" == serial


def test_two_at_once_lose_nothing(folder: Folder) -> None:
    def add(number: int) -> None:
        mine = Folder(folder.path)
        with mine.held():
            office.add(mine, f"acme.board-{number}", NOW, DAY)
            mine.finish()

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(office.inventory(folder, NOW)) == 8


def test_a_board_s_life_in_the_inventory(folder: Folder) -> None:
    code_for(folder, DEVICE)
    assert state(folder, DEVICE) == "waiting"
    assert state(folder, DEVICE, NOW + 8 * DAY) == "lapsed"
    enrolled(folder, DEVICE)
    assert state(folder, DEVICE) == "enrolled"
    assert state(folder, DEVICE, NOW + LIFE - 59 * DAY) == "due"
    assert state(folder, DEVICE, NOW + LIFE) == "expired"
    office.revoke(folder, "board", DEVICE, NOW)
    folder.finish()
    assert state(folder, DEVICE) == "revoked"
    enrolled(folder, DEVICE, NOW + DAY)
    assert state(folder, DEVICE, NOW + DAY) == "enrolled"


def test_the_inventory_has_a_line_for_each(folder: Folder) -> None:
    certificate = enrolled(folder, DEVICE)
    code_for(folder, "umbrella.lab")
    lines = provision(folder.path, "inventory").output.splitlines()
    assert [line.split()[:2] for line in lines] == [["board", DEVICE], ["board", "umbrella.lab"]]
    objects = [msgspec.json.decode(line) for line in provision(folder.path, "inventory", "--json").output.splitlines()]
    assert objects[0]["serial"] == f"{certificate.serial_number:x}"
    assert set(objects[1]) == {"name", "role", "state", "ends", "serial"}


def test_a_code_is_given_out_again_only_when_asked_for(folder: Folder) -> None:
    assert code_for(folder, DEVICE)
    assert not code_for(folder, DEVICE)
    assert code_for(folder, DEVICE, again=True)
    assert code_for(folder, DEVICE, NOW + 8 * DAY)  # the latest has ended, and nothing came of it


def test_renewal_keeps_the_key_and_needs_nothing_from_the_board(folder: Folder) -> None:
    first = enrolled(folder, DEVICE)
    due = NOW + LIFE - 30 * DAY
    answers, _ = office.renew(folder, (), due, LIFE)
    second = certificate_of(answers[DEVICE])
    assert second.public_key() == first.public_key() and second.subject == first.subject
    assert second.not_valid_after_utc == due + LIFE
    folder.finish()
    assert office.renew(folder, (), due, LIFE)[0] == {}
    assert not listed(folder.path / "crl.pem", first)


def test_renewal_before_its_time_gives_what_there_is_unless_forced(folder: Folder) -> None:
    first = enrolled(folder, DEVICE)
    assert certificate_of(office.renew(folder, (DEVICE,), NOW, LIFE)[0][DEVICE]) == first
    assert certificate_of(office.renew(folder, (DEVICE,), NOW, LIFE, force=True)[0][DEVICE]) != first


def test_a_revoked_or_unknown_board_is_not_renewed(folder: Folder) -> None:
    enrolled(folder, DEVICE)
    code_for(folder, "umbrella.lab")
    office.revoke(folder, "board", DEVICE, NOW)
    folder.finish()
    for name, error in ((DEVICE, IdentityError), ("umbrella.lab", IdentityError), ("acme.hall", MissingError)):
        with pytest.raises(error):
            office.renew(folder, (name,), NOW, LIFE)


def test_revoking_ends_every_certificate_and_the_code(folder: Folder) -> None:
    private = key()
    code = code_for(folder, DEVICE)
    first = certificate_of(enrol(folder, DEVICE, make_request(DEVICE, private, code)))
    second = certificate_of(office.renew(folder, (DEVICE,), NOW, LIFE, force=True)[0][DEVICE])
    folder.finish()
    office.revoke(folder, "board", DEVICE, NOW)
    folder.finish()
    assert listed(folder.path / "crl.pem", first) and listed(folder.path / "crl.pem", second)
    with pytest.raises(IdentityError, match="has no code"):
        office.sign(folder, make_request(DEVICE, private, code), "request", NOW, LIFE)


def test_what_has_expired_leaves_the_lists(folder: Folder) -> None:
    """So neither list grows for ever."""
    gone = enrolled(folder, DEVICE)
    office.revoke(folder, "board", DEVICE, NOW)
    folder.finish()
    assert f"user {DEVICE}\ntopic deny #\n" in office.access(folder, NOW)
    later = NOW + LIFE + DAY
    enrolled(folder, "acme.hall", later)
    office.revoke(folder, "board", "acme.hall", later)
    folder.finish()
    assert not listed(folder.path / "crl.pem", gone)
    assert DEVICE not in office.access(folder, later)


def test_the_access_list_does_not_grow_with_the_fleet(folder: Folder) -> None:
    empty = office.access(folder, NOW)
    for number in range(20):
        enrolled(folder, f"tenant-{number}.board")
    assert office.access(folder, NOW) == empty


def test_verifiers_get_one_secret_and_nobody_else_gets_it(tmp_path: Path, folder: Folder) -> None:
    for role, name in (("verifier", "gpu-1"), ("verifier", "gpu-2"), ("operator", "ann")):
        assert provision(folder.path, "issue", role, name, "--out", tmp_path / name).exit_code == 0
    secret = (tmp_path / "gpu-1" / "share").read_text()
    assert secret == (tmp_path / "gpu-2" / "share").read_text() and len(secret.strip()) == 32
    assert (tmp_path / "gpu-1" / "share").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "gpu-1" / "key.pem").read_bytes() != (tmp_path / "gpu-2" / "key.pem").read_bytes()
    assert not (tmp_path / "ann" / "share").exists()
    enrolled(folder, DEVICE)
    assert secret.strip() not in office.access(folder, NOW)


def configure(folder: Folder, out: Path, *hosts: str, now: datetime = NOW) -> x509.Certificate:
    """The broker's certificate."""
    office.broker(folder, out, hosts, now, LIFE, at=out, state=out, ports=[8883], websockets_port=None, connections=10)
    folder.finish()
    return x509.load_pem_x509_certificate((out / "broker.pem").read_bytes())


def test_the_broker_s_certificate_is_made_anew_when_its_names_change_or_it_is_due(
    tmp_path: Path, folder: Folder
) -> None:
    out = tmp_path / "broker"
    first = configure(folder, out, "broker.example", "10.0.0.1")
    assert configure(folder, out, "broker.example", "10.0.0.1") == first
    second = configure(folder, out, "broker.example", "10.0.0.2")
    names = second.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["broker.example"]
    assert [str(name) for name in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.2"]
    third = configure(folder, out, "broker.example", "10.0.0.2", now=NOW + LIFE - 30 * DAY)
    assert third != second and third.public_key() == first.public_key()


def test_the_broker_gets_a_revocation_list_that_does_not_end_under_it(tmp_path: Path, folder: Folder) -> None:
    gone = enrolled(folder, DEVICE)
    office.revoke(folder, "board", DEVICE, NOW)
    folder.finish()
    out = tmp_path / "broker"
    configure(folder, out, "broker.example")
    assert listed(out / "crl.pem", gone)
    later = NOW + LIST_LIFE * 3 / 4
    configure(folder, out, "broker.example", now=later)
    ends = x509.load_pem_x509_crl((out / "crl.pem").read_bytes()).next_update_utc
    assert ends is not None and ends == later + LIST_LIFE


def test_the_broker_s_files_may_lie_elsewhere_on_its_machine(tmp_path: Path, folder: Folder) -> None:
    out = tmp_path / "broker"
    words = ("broker-config", "h", "--out", out, "--at", "/etc/mosquitto/outrider", "--port", "8883", "--port", "443")
    assert provision(folder.path, *words).exit_code == 0
    text = (out / "mosquitto.conf").read_text()
    assert str(tmp_path) not in text
    assert "listener 8883\n" in text and "listener 443\n" in text
    assert text.count("keyfile /etc/mosquitto/outrider/broker.key\n") == text.count("require_certificate true\n") == 2
    assert (out / "broker.key").stat().st_mode & 0o777 == 0o600


def test_no_certificate_outlives_its_authority(folder: Folder) -> None:
    late = NOW + 20 * 365 * DAY - DAY
    ends = folder.authority().certificate.not_valid_after_utc
    assert enrolled(folder, DEVICE, late).not_valid_after_utc == ends


def test_a_folder_whose_parts_do_not_belong_together_is_refused(tmp_path: Path, folder: Folder) -> None:
    request = make_request(DEVICE, key(), code_for(folder, DEVICE))
    for content, said in (
        ((made(tmp_path / "other").path / "ca.key").read_bytes(), "is not the key of ca.pem"),
        (b"not a key", "not a private key"),
    ):
        (folder.path / "ca.key").write_bytes(content)
        with pytest.raises(IdentityError, match=said):
            enrol(folder, DEVICE, request)
    (folder.path / "ca.pem").write_text("not a certificate")
    with pytest.raises(FileError, match="not a certificate"):
        folder.certificate(folder.path / "ca.pem")

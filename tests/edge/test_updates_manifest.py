"""What a board takes for a release, and how it refuses everything else."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edge.updates.errors import CompatibilityError, FormatError, SelfTestError, SignatureError
from edge.updates.manifest import check_fits, content_digest, is_in_stage, open_payload, open_signed, parse
from edge.updates.settings import Settings, apply
from protocol.messages import Announcement, Resync, encode
from tests.edge.releases import FACTS, KEY, PUBLIC, Shelf, flash, settings, sign

OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
OTHER_PUBLIC = OTHER.public_key().public_bytes_raw().hex()


def signed(manifest: dict) -> Announcement:
    raw = msgspec.json.encode(manifest)
    return Announcement(raw, KEY.sign(raw))


def plain(**changes) -> dict:
    return {**msgspec.to_builtins(Shelf().model("m-1", 1)), **changes}


def test_a_signed_release_comes_out_as_it_went_in():
    release = Shelf().model("m-1", 3, boards=("raspberry-pi-5",), percent=12.5)
    assert open_payload(encode(sign(release)), [PUBLIC]) == release


def test_any_of_several_keys_will_do_so_that_keys_can_change():
    release = Shelf().model("m-1", 1)
    for key in (KEY, OTHER):
        assert open_signed(sign(release, key), [PUBLIC, OTHER_PUBLIC]) == release


def test_a_strangers_signature_and_one_changed_bit_are_refused():
    announcement = sign(Shelf().model("m-1", 1))
    with pytest.raises(SignatureError, match="not signed by a key"):
        open_signed(announcement, [OTHER_PUBLIC])
    for at in range(0, len(announcement.manifest), 37):
        changed = bytearray(announcement.manifest)
        changed[at] ^= 1
        with pytest.raises(SignatureError):
            open_signed(msgspec.structs.replace(announcement, manifest=bytes(changed)), [PUBLIC])


def test_nothing_is_parsed_before_it_is_verified():
    with pytest.raises(SignatureError):
        open_signed(Announcement(b"\xff not even JSON", bytes(64)), [PUBLIC])


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "firmware"},
        {"format": 2},
        {"serial": 0},
        {"percent": 101},
        {"only_if": "a restriction that this runtime does not know"},
        {"files": []},
        {"files": [{**plain()["files"][0], "url": "http://releases.example/plain"}]},
        {"files": [{**plain()["files"][0], "name": "../../etc/passwd"}]},
        {"files": [{**plain()["files"][0], "name": "release.json"}]},
        {"files": [plain()["files"][0], plain()["files"][0]]},
        {"tokenizer_digest": "12"},
        {"release": "m 1"},
        {"channel": "a/b"},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_manifest_that_is_misshapen_is_refused_though_it_is_signed(changes):
    with pytest.raises(FormatError):
        open_signed(signed(plain(**changes)), [PUBLIC])


def test_another_message_in_its_place_is_refused():
    with pytest.raises(FormatError, match="Resync is no announcement"):
        open_payload(encode(Resync(7, 2, 131, 1)), [PUBLIC])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"boards": ("jetson-agx-orin",)}, "for jetson-agx-orin, this is a raspberry-pi-5"),
        ({"least_version": "0.1.1"}, "needs runtime 0.1.1, this is 0.1.0"),
        ({"least_version": "0.2"}, "needs runtime 0.2"),
        ({"tokenizer_digest": "f" * 64}, "tokenizer ffffffffffff"),
    ],
)
def test_a_release_for_another_board_runtime_or_tokenizer_is_refused(changes, says):
    with pytest.raises(CompatibilityError, match=says):
        check_fits(Shelf().model("m-1", 1, **changes), FACTS)


@pytest.mark.parametrize("least", ["0", "0.1", "0.1.0", "0.0.9"])
def test_a_runtime_that_is_new_enough_may_take_it(least):
    check_fits(Shelf().model("m-1", 1, least_version=least, boards=("generic", "raspberry-pi-5")), FACTS)


def test_a_stage_holds_its_share_and_all_of_the_stage_before():
    fleet = [f"acme.board-{i}" for i in range(4000)]
    first, wider = ({name for name in fleet if is_in_stage(name, "m-7", percent)} for percent in (10, 30))
    assert first < wider
    assert 0.08 < len(first) / len(fleet) < 0.12 and 0.27 < len(wider) / len(fleet) < 0.33
    assert not any(is_in_stage(name, "m-7", 0) for name in fleet) and all(is_in_stage(n, "m-7", 100) for n in fleet)
    other = {name for name in fleet if is_in_stage(name, "m-8", 10)}
    assert len(first & other) < len(first) / 3, "each release begins with other boards"


def test_the_digest_is_of_the_content_alone():
    shelf = Shelf()
    release = shelf.model("m-1", 1)
    moved = [msgspec.structs.replace(file, url="https://mirror.example/x") for file in reversed(release.files)]
    again = msgspec.structs.replace(release, release="m-1-again", serial=9, percent=1, files=tuple(moved))
    assert content_digest(again) == content_digest(release) != content_digest(shelf.model("m-2", 1))
    assert content_digest(settings("s", 1, patience_s=1)) != content_digest(settings("s", 1, patience_s=2))


def test_settings_change_what_is_listed_and_leave_the_rest(tmp_path):
    config = flash(tmp_path)
    changed = apply(config, Settings(patience_s=0.5, policy="chain"))
    assert (changed.session.patience_s, changed.drafting.policy) == (0.5, "chain")
    assert changed.device == config.device and changed.broker == config.broker
    assert apply(config, Settings()) == config
    assert apply(config, Settings(patience_s=1e9)).session.patience_s == float("inf")


def test_settings_that_contradict_the_boards_file_do_not_pass(tmp_path):
    with pytest.raises(SelfTestError, match="waits for verdicts"):
        apply(flash(tmp_path), Settings(policy="sync"))


def test_no_other_setting_can_be_changed_from_afar():
    raw = {"kind": "settings", "release": "s", "serial": 1, "channel": "stable", "settings": {"host": "evil.example"}}
    with pytest.raises(FormatError, match="unknown field `host`"):
        parse(msgspec.json.encode(raw))

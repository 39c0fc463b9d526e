"""Packed ids and text hashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import WireError
from protocol.text import MAX_ID, extend_hash, owner_hash, pack, prefix_hashes, unpack


@given(st.lists(st.integers(0, MAX_ID)))
def test_ids_survive_packing(ids):
    assert list(unpack(pack(ids))) == ids


def test_frequent_ids_take_two_bytes_and_those_of_large_vocabularies_three():
    assert [len(pack([i])) for i in (0, 127, 128, 16383, 16384, 151_935)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("bad", [-1, MAX_ID + 1])
def test_an_id_that_cannot_travel_is_refused(bad):
    with pytest.raises(WireError):
        pack([bad])


@given(st.binary(max_size=12))
def test_any_bytes_unpack_to_one_canonical_form_or_are_refused(data):
    try:
        ids = unpack(data)
    except WireError:
        return
    assert pack(ids) == data


def test_hashes_tell_texts_owners_and_epochs_apart():
    text = [5, 900, 151_000]
    seeds = {owner_hash(7, "v1", 0), owner_hash(7, "v2", 0), owner_hash(7, "v1", 1), owner_hash(8, "v1", 0)}
    assert len(seeds) == 4
    whole = {prefix_hashes(seed, text)[-1] for seed in seeds}
    assert len(whole) == 4
    seed = owner_hash(7, "v1", 0)
    assert prefix_hashes(seed, text)[2] == extend_hash(extend_hash(seed, 5), 900)
    assert prefix_hashes(seed, [900, 5])[-1] != prefix_hashes(seed, [5, 900])[-1]


def test_the_hash_is_frozen():
    assert owner_hash(0x0123456789ABCDEF, "v1a2b3c4d5", 2) == 0x37DECE6A
    assert prefix_hashes(0, [1, 300, 49151])[-1] == 0xF8D94971

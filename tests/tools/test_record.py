"""Recording: the target's own text, and beside each token what the drafter would have proposed there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import load as load_target
from edge.drafters import manifest, runtimes
from edge.drafters.base import Candidate
from edge.drafters.cached import CachedDrafter
from edge.text import Text
from protocol.errors import ConfigError, ModelError
from protocol.sampling import Sampling
from tools import traces
from tools.demo.reference import decode_alone
from tools.twin.record import record, trace_text

PROMPTS = ["What is the capital of France?", "Say hello."]  # SmolLM2 ends its greedy answer to the first
MAX_TOKENS = 10
SETTINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=11)}
PROSE = (
    "A drafter that runs on the board proposes a few tokens, and a large model in the cloud certifies them. "
    "Neither side waits for the other, and what turns out to be wrong costs time, never text."
)


def run(*arguments: object, **options: object) -> Result:
    """The command with this test's choice of speed over bits; errors of its own are raised."""
    words = [*map(str, arguments), "--numerics", "fast", "--threads", "1", "--max-tokens", str(MAX_TOKENS)]
    result = CliRunner().invoke(record, [*words, *(f"--{name}={value}" for name, value in options.items())])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def command(pair: tuple[Path, Path], out: Path, sampling: Sampling) -> list[object]:
    drawn = ["--temperature", sampling.temperature, "--top-p", sampling.top_p, "--seed", sampling.seed]
    return ["--drafter", pair[0], "--target", pair[1], "--out", out, *drawn]


@pytest.fixture(scope="module")
def files(smollm2: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recorded file for each of SETTINGS."""
    folder = tmp_path_factory.mktemp("traces")
    for name, sampling in SETTINGS.items():
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        result = run(*command(smollm2, folder / name, sampling), *prompts)
        assert result.exit_code == 0, result.output
    return {name: folder / name for name in SETTINGS}


@pytest.fixture(scope="module")
def drafter(smollm2: tuple[Path, Path]) -> CachedDrafter:
    return runtimes.load(smollm2[0], context=512)


@pytest.fixture(scope="module")
def text(smollm2: tuple[Path, Path]) -> Text:
    return Text.load(smollm2[0], manifest.read(smollm2[0], "drafter"))


def chat(text: Text, prompt: str) -> list[int]:
    return text.chat([{"role": "user", "content": prompt}])


def nth(sampling: Sampling, number: int) -> Sampling:
    """Each text has a seed of its own."""
    return msgspec.structs.replace(sampling, seed=sampling.seed + number)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def token_by_token(
    drafter: CachedDrafter, prompt: list[int], target: tuple[int, ...], sampling: Sampling, n: int
) -> list[list[Candidate]]:
    """What a board that never runs ahead would ask of its drafter."""
    row = drafter.prefill(prompt)
    found = [drafter.candidates(row, sampling, n)]
    for id in target[:-1]:
        (row,) = drafter.extend([(id, row)])
        found.append(drafter.candidates(row, sampling, n))
        drafter.keep([row])
    return found


def test_each_text_is_what_the_engine_writes_alone(smollm2, files, text):
    engine = load_target(smollm2[1], Numerics(mode="fast"), threads=1)
    for name, sampling in SETTINGS.items():
        for number, (trace, prompt) in enumerate(zip(traces.load(files[name]), PROMPTS, strict=True)):
            own = nth(sampling, number)
            alone = decode_alone(engine, chat(text, prompt), own, MAX_TOKENS, sorted(text.stop_ids))
            assert trace.prompt == prompt
            assert list(trace.target) == alone


def test_a_text_ends_with_its_stop_id_or_at_its_length(files, text):
    ended, cut = traces.load(files["greedy"])
    assert len(ended.target) < MAX_TOKENS and ended.target[-1] in text.stop_ids
    assert len(cut.target) == MAX_TOKENS
    assert text.stop_ids.isdisjoint([*ended.target[:-1], *cut.target])


@pytest.mark.parametrize("name", SETTINGS)
def test_candidates_are_what_the_drafter_gives_token_by_token(smollm2, files, text, name):
    drafter = runtimes.load(smollm2[0], context=512)
    for number, trace in enumerate(traces.load(files[name])):
        own = nth(SETTINGS[name], number)
        expected = token_by_token(drafter, chat(text, trace.prompt), trace.target, own, 8)
        for ids, p, candidates in zip(trace.draft_ids, trace.draft_p, expected, strict=True):
            assert list(ids) == [candidate.id for candidate in candidates]
            assert p == pytest.approx([candidate.probability for candidate in candidates], abs=1e-6)


def test_many_rows_at_once_would_have_proposed_nearly_the_same(drafter, text):
    """No candidate is off by a position: one pass over the whole text, which counts its positions itself, agrees."""
    prompt, target = chat(text, "?"), text.encode(PROSE)[:32]
    trace = trace_text(drafter, "?", prompt, target, Sampling(), 8)
    root = drafter.prefill(prompt)
    rows = drafter.extend([(id, i - 1 if i else root) for i, id in enumerate(target[:-1])])
    for ids, p, row in zip(trace.draft_ids[1:], trace.draft_p[1:], rows, strict=True):
        assert p == pytest.approx(softmax(drafter.logits(row))[list(ids)], abs=0.1)  # other kernels, other rounding


def test_p_target_counts_ids_beyond_the_candidates(drafter, text):
    prompt, target = chat(text, "?"), text.encode(PROSE)[:24]
    trace = trace_text(drafter, "?", prompt, target, Sampling(), 1)
    assert trace.acceptance < 0.5  # prose that no model wrote: most of it is not the best candidate
    row = drafter.prefill(prompt)
    for id, p in zip(target, trace.p_target, strict=True):
        assert p == pytest.approx(softmax(drafter.logits(row))[id], abs=1e-6)
        (row,) = drafter.extend([(id, row)])
        drafter.keep([row])


def test_p_target_is_zero_where_the_drafter_would_never_draw_the_id(drafter, text):
    target = text.encode(PROSE)[:24]
    nucleus = Sampling(temperature=0.7, top_p=0.5, seed=3)
    trace = trace_text(drafter, "?", chat(text, "?"), target, nucleus, 1000)
    survives = [id in ids for id, ids in zip(target, trace.draft_ids, strict=True)]
    assert any(survives) and not all(survives)
    assert [p > 0 for p in trace.p_target] == survives
    assert [sum(p) for p in trace.draft_p] == pytest.approx([1.0] * 24, abs=1e-3)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_weights_in_four_bits_are_mostly_right(files, name):
    for trace in traces.load(files[name]):
        assert 0.45 <= trace.acceptance <= 1.0
        among = [id in ids for id, ids in zip(trace.target, trace.draft_ids, strict=True)]
        assert np.mean(among) >= max(trace.acceptance, 0.75)


def test_same_pair_prompts_and_seed_give_the_same_file(smollm2, files, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join([PROMPTS[0], "", f"  {PROMPTS[1]}", ""]))
    out = tmp_path / "again"
    assert run(*command(smollm2, out, SETTINGS["sampled"]), prompts=tmp_path / "prompts.txt").exit_code == 0
    assert out.read_bytes() == files["sampled"].read_bytes()


def altered(directory: Path, copy: Path, **facts: object) -> Path:
    """A copy of a model directory (its large files by link) with another manifest."""
    copy.mkdir()
    for file in directory.iterdir():
        if file.name == manifest.MANIFEST:
            (copy / file.name).write_text(json.dumps(json.loads(file.read_text()) | facts))
        elif file.stat().st_size > 1 << 24:
            (copy / file.name).symlink_to(file)
        else:
            shutil.copy(file, copy)
    return copy


def test_a_text_of_one_token_is_left_out_and_said(smollm2, files, tmp_path):
    first, second = traces.load(files["greedy"])
    target = altered(smollm2[1], tmp_path / "target", stop_ids=[first.target[0]])
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    result = run(*command((smollm2[0], target), tmp_path / "out", Sampling()), *prompts)
    assert "text 1 is left out" in result.output
    assert [trace.prompt for trace in traces.load(tmp_path / "out")] == [second.prompt]


def test_models_of_two_families_are_refused(smollm2, tmp_path):
    target = altered(smollm2[1], tmp_path / "target")
    tokenizer = target / manifest.TOKENIZER
    tokenizer.write_text(tokenizer.read_text() + " ")
    facts = json.loads((target / manifest.MANIFEST).read_text())
    facts["tokenizer_digest"] = manifest.digest(tokenizer)
    (target / manifest.MANIFEST).write_text(json.dumps(facts))
    with pytest.raises(ModelError, match="one family"):
        run(*command((smollm2[0], target), tmp_path / "out", Sampling()), "--prompt", "?")


def test_a_text_longer_than_the_context_is_refused_before_anything_is_loaded(smollm2, tmp_path):
    drafter = altered(smollm2[0], tmp_path / "drafter", context=MAX_TOKENS + 8)
    with pytest.raises(ModelError, match=f"context of {MAX_TOKENS + 8}"):
        run(*command((drafter, smollm2[1]), tmp_path / "out", Sampling()), "--prompt", "?")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "?"], "give --drafter and --target, or --pair"),
        (["--prompt", "?", "--drafter", "a"], "give --drafter and --target, or --pair"),
        (["--prompt", "?", "--drafter", "a", "--target", "b", "--pair", "smollm2"], "or --pair"),
        (["--pair", "smollm2"], "give a --prompt"),
    ],
)
def test_what_is_missing_is_said(tmp_path, words, said):
    result = run(*words, "--out", tmp_path / "out")
    assert result.exit_code == 2 and said in result.output


def test_a_missing_folder_is_said_before_the_work(tmp_path):
    result = run("--pair", "smollm2", "--prompt", "?", "--out", tmp_path / "nowhere" / "out")
    assert result.exit_code == 2 and "nowhere" in result.output


def test_a_missing_file_of_prompts_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        run("--pair", "smollm2", "--prompts", tmp_path / "nowhere", "--out", tmp_path / "out")

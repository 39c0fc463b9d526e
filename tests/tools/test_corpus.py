"""The corpus: the target's own text behind every prompt, whole lines, and a run that goes on where it was killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import load as load_target
from edge.drafters.manifest import read as read_manifest
from edge.text import Text
from protocol.errors import ConfigError
from protocol.sampling import Sampling
from tests.tools import tiny_models
from tools.corpus import prompts, text
from tools.corpus.__main__ import main
from tools.corpus.text import Written
from tools.demo.reference import decode_alone
from tools.export import sources, write

TOKENS = 6
PROMPTS = "# cats\nthe cat\nthe hat\n\n# numbers\none two\n456\n# signs\nna naïve Straße\n"
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    source = sources.read(str(tiny_models.directory(folder / "tiny-llama", "llama")))
    write.write_target(source, folder / "target")
    return folder / "target"


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text(PROMPTS, encoding="utf-8")
    return tmp_path / "prompts.txt"


def run(target: Path, prompts_file: Path, out: Path, *options: str) -> Result:
    arguments = ["write", "--target", target, "--prompts", prompts_file, "--out", out, "--tokens", TOKENS]
    common = ["--numerics", "fast", "--threads", 1, "--batch", 2]
    return CliRunner().invoke(main, [str(one) for one in [*arguments, *common, *options]])


def test_holds_what_the_target_writes_alone_behind_each_prompt(target: Path, prompts_file: Path, tmp_path: Path):
    result = run(target, prompts_file, tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(target, "target")
    ours = Text.load(target, manifest)
    engine = load_target(target, Numerics(mode="fast"), threads=1)
    expected = {}
    for prompt in prompts.read(prompts_file):
        ids = ours.chat([{"role": "user", "content": prompt.text}])
        written = decode_alone(engine, ids, Sampling(), TOKENS, sorted(manifest.stop_ids))
        expected[tuple(ids)] = Written(tuple(ids), tuple(written), prompt.split)
    found = text.read(tmp_path / "out.jsonl")
    assert {one.prompt: one for one in found} == expected
    assert len(found) == len(expected) == 5
    assert all(one.text[-1] in manifest.stop_ids or len(one.text) == TOKENS for one in found)


def test_a_killed_run_goes_on_with_what_is_missing(target: Path, prompts_file: Path, tmp_path: Path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert run(target, prompts_file, whole).exit_code == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:2]) + lines[2][:-9])
    assert run(target, prompts_file, cut).exit_code == 0
    assert cut.read_bytes().startswith(b"".join(lines[:2]))
    assert sorted(cut.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
    before = cut.read_bytes()
    assert run(target, prompts_file, cut).exit_code == 0
    assert cut.read_bytes() == before


def test_a_file_of_other_prompts_is_not_mixed_in(target: Path, prompts_file: Path, tmp_path: Path):
    text.append(tmp_path / "out.jsonl", Written((5, 6), (7,), "calibration"))
    result = run(target, prompts_file, tmp_path / "out.jsonl")
    assert isinstance(result.exception, ConfigError)
    assert "other prompts" in str(result.exception)


def test_no_topic_is_in_both_splits_and_a_third_is_held_out():
    ours = prompts.read()
    by_topic = {prompt.topic: {one.split for one in ours if one.topic == prompt.topic} for prompt in ours}
    assert all(len(splits) == 1 for splits in by_topic.values())
    held_out = sum(splits == {"held-out"} for splits in by_topic.values())
    assert len(by_topic) // 3 == held_out
    assert len(ours) > 200


def test_topics_that_are_added_leave_the_split_of_the_others(prompts_file: Path):
    before = prompts.read(prompts_file)
    prompts_file.write_text(PROMPTS + "# more\nanother\n", encoding="utf-8")
    assert prompts.read(prompts_file)[: len(before)] == before


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "no prompt"),
        ("a prompt\n", "line 1: a prompt before"),
        ("# a\nx\n# a\ny\n", "line 3: the topic 'a'"),
        ("# a\nx\n# b\nx\n", "line 4: the prompt"),
    ],
)
def test_a_prompts_file_that_would_mislead_is_refused(tmp_path: Path, content: str, said: str):
    (tmp_path / "p.txt").write_text(content)
    with pytest.raises(ConfigError, match=said):
        prompts.read(tmp_path / "p.txt")


def test_a_line_that_is_no_text_is_named(tmp_path: Path):
    text.append(tmp_path / "c.jsonl", Written((1,), (2,), "calibration"))
    with open(tmp_path / "c.jsonl", "a") as file:
        file.write('{"prompt": [1], "text": "two", "split": "calibration"}\n')
    with pytest.raises(ConfigError, match="line 2: not a text"):
        text.read(tmp_path / "c.jsonl")
    with pytest.raises(ConfigError, match="no held-out"):
        (tmp_path / "d.jsonl").write_bytes((tmp_path / "c.jsonl").read_bytes().splitlines(keepends=True)[0])
        text.read(tmp_path / "d.jsonl", "held-out")


def test_counts_are_of_what_was_written_not_of_the_prompts():
    texts = [Written((9, 9), (1, 2, 2), "calibration"), Written((3,), (2, 5), "calibration")]
    assert np.array_equal(text.counts(texts, 8), [0, 1, 3, 0, 0, 1, 0, 0])

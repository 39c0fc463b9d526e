"""Guesses that travel with a drafter: a board that computes as it should makes them again, another does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="a tiny model is made with torch")

from edge.drafters import golden, manifest, runtimes
from edge.drafters.manifest import Golden
from tests.tools import tiny_models
from tests.toys import VOCAB, ToyDrafter
from tools.export import graph, sources, write

PROMPT = (1, 2, 3)


def test_an_export_records_what_its_drafter_guesses(tmp_path: Path):
    source = sources.read(str(tiny_models.directory(tmp_path / "hf", "llama")))
    written = write.write_drafter(source, tmp_path / "out", graph.Options())
    found = manifest.read(tmp_path / "out", "drafter")
    assert found == written and found.golden is not None
    assert len(found.golden.ids) == golden.GUESSES and set(found.golden.sure) <= set(range(golden.GUESSES))
    assert golden.wrong(runtimes.load(tmp_path / "out"), found.golden) == []


def test_a_context_too_short_for_it_is_no_obstacle(tmp_path: Path):
    source = sources.read(str(tiny_models.directory(tmp_path / "hf", "llama")))
    assert write.write_drafter(source, tmp_path / "out", graph.Options(context=16)).golden is None


def test_only_places_that_were_sure_count():
    drafter = ToyDrafter()
    made = golden.record(drafter, PROMPT)
    assert golden.wrong(drafter, made) == [] and made.sure
    first = made.sure[0]
    other = tuple((id + 1) % VOCAB if place == first else id for place, id in enumerate(made.ids))
    assert first in golden.wrong(drafter, Golden(PROMPT, other, made.sure))
    unsure = Golden(PROMPT, other, tuple(place for place in made.sure if place < first))
    assert golden.wrong(drafter, unsure) == []


def test_weights_that_are_not_the_exported_ones_are_noticed(tmp_path: Path, smollm2: tuple[Path, Path]):
    drafter = runtimes.load(smollm2[0], threads=2)
    made = golden.record(drafter, range(100, 120))
    assert golden.wrong(runtimes.load(smollm2[0], threads=1), made) == []
    broken = tmp_path / "broken"
    shutil.copytree(smollm2[0], broken)
    weights = broken / manifest.read(broken, "drafter").weights_files[-1]
    data = np.fromfile(weights, np.uint8)
    data[len(data) // 3 : len(data) // 2] = 0x11
    data.tofile(weights)
    assert golden.wrong(runtimes.load(broken, threads=2), made)

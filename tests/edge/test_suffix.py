"""What was written before: found where it was, believed as far as texts show it, and alone enough for a board."""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from edge.config import DeviceConfig, DrafterConfig, EdgeConfig
from edge.drafters import manifest
from edge.drafters.automaton import MOST_CONTINUATIONS, MOST_COUNTED, NOTHING, SuffixAutomaton
from edge.drafters.base import Candidate, DrafterInfo, Foresees
from edge.drafters.recall import Recall, RecallOdds
from edge.drafters.suffix import SuffixDrafter
from edge.loading import load_drafter, load_text
from protocol.errors import ModelError
from protocol.sampling import Sampling

INFO = DrafterInfo("tiny", 1000, 64, "1" * 64, "", "none", "none")
TEXTS = st.lists(st.integers(0, 3), max_size=60)
GREEDY = Sampling()


def automaton(text) -> SuffixAutomaton:
    made = SuffixAutomaton()
    for id in text:
        made.append(id)
    return made


def ends(text, string) -> list[int]:
    """Where `string` ends in `text`, by looking everywhere."""
    size = len(string)
    return [i for i in range(size, len(text) + 1) if text[i - size : i] == string]


def longest_end(text, string) -> list[int]:
    """The longest suffix of `string` that occurs in `text`."""
    return next(string[i:] for i in range(len(string) + 1) if ends(text, string[i:]))


# -- the automaton ----------------------------------------------------------------------------------------------------


@given(TEXTS)
def test_the_longest_end_that_occurred_before(text):
    expected = next((n for n in range(len(text) - 1, 0, -1) if len(ends(text, text[-n:])) > 1), 0)
    assert automaton(text).longest().length == expected


@given(TEXTS, st.lists(st.integers(0, 4), max_size=12))
def test_a_match_is_followed_through_guesses_as_a_search_of_the_text_would(text, guesses):
    made = automaton(text)
    match, string = made.longest(), text[len(text) - made.longest().length :]
    for id in guesses:
        match, string = made.step(match, id), longest_end(text, [*string, id])
        assert match.length == len(string)
        if string:
            after = [text[end] for end in ends(text, string) if end < len(text)]
            found = made.continuations(match)
            assert {one.id for one in found} == set(after)
            assert all(1 <= one.times <= after.count(one.id) for one in found)
            assert all(
                one.end == ends(text, [*string, one.id])[-1] - 1 for one in found if one.times == after.count(one.id)
            )
            if len(text) <= MOST_COUNTED:
                assert [one.times for one in found] == sorted((after.count(id) for id in set(after)), reverse=True)


@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=20), st.lists(st.integers(0, 3), max_size=6))
def test_a_match_that_was_found_before_the_text_grew_still_names_its_string(text, more, guesses):
    made = automaton(text)
    match = made.longest()
    string = text[len(text) - match.length :]
    for id in more:
        made.append(id)
    grown = text + more
    if string:
        assert {one.id for one in made.continuations(match)} == {
            grown[e] for e in ends(grown, string) if e < len(grown)
        }
    for id in guesses:
        match, string = made.step(match, id), longest_end(grown, [*string, id])
        assert match.length == len(string)


def test_an_end_that_everything_follows_says_nothing():
    text = [x for i in range(MOST_CONTINUATIONS + 1) for x in (0, 10 + i)]
    assert automaton([*text[:-2], 0]).continuations(automaton([*text[:-2], 0]).longest())
    assert automaton([*text, 0]).continuations(automaton([*text, 0]).longest()) == []


@pytest.mark.parametrize("text", [[5] * 8000, [5, 6] * 4000, [x for i in range(4000) for x in (0, i)]])
def test_a_text_made_to_be_slow_is_not(text):
    recall = Recall()
    began = time.process_time()
    recall.become(text)
    assert time.process_time() - began < 3.0  # some 0.3 s; a walk over all suffixes would take a minute


# -- how far it is believed -------------------------------------------------------------------------------------------


def judged(recall: Recall, text) -> list[tuple[float, bool]]:
    """(how likely the guess was said to be right, whether it was) at each position of a text."""
    found = []
    for id in text:
        best = recall.candidates(recall.end(), 1)
        if best:
            found.append((best[0].probability, best[0].id == id))
        recall.read([id])
    return found


def test_in_a_text_without_repeats_nothing_is_guessed():
    recall = Recall()
    assert judged(recall, range(500)) == [] and recall.end() == NOTHING


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_what_it_says_is_what_happens(share):
    """Texts that repeat a passage and break off at random: over many of them the probabilities add up to the hits."""
    rng, odds = random.Random(3), RecallOdds()
    found: list[tuple[float, bool]] = []
    for turn in range(60):
        passage = [rng.randrange(40) for _ in range(60)]
        text = list(passage)
        at = 0
        while len(text) < 200:
            at = at + 1 if rng.random() < share else rng.randrange(len(passage))
            text.append(passage[at % len(passage)])
        fresh = judged(Recall(odds), text)
        found += fresh if turn >= 20 else []
    for low, high in ((0.0, 0.3), (0.3, 0.7), (0.7, 1.0)):
        those = [(p, hit) for p, hit in found if low <= p < high]
        if len(those) > 300:
            said, was = (sum(column) / len(those) for column in zip(*those, strict=True))
            assert said == pytest.approx(was, abs=0.06)
    if share == 0.0:
        assert sum(p > 0.5 for p, _ in found) < len(found) / 50
    if share == 0.9:
        assert sum(p > 0.8 for p, _ in found) > len(found) / 3, "where it repeats, it is believed"


def test_a_board_goes_on_believing_what_earlier_texts_taught_it():
    odds = RecallOdds()
    for _ in range(50):
        Recall(odds).read([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5, 7])
    fresh = Recall(odds)
    fresh.read([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5])
    assert fresh.candidates(fresh.end(), 1)[0].probability < 0.2


def test_a_text_that_changes_what_it_repeats_is_believed_less_than_others():
    odds, passage = RecallOdds(), list(range(10, 40))
    for _ in range(20):
        Recall(odds).read([*passage, 5, *passage])
    hard, fresh = Recall(odds), Recall(odds)
    hard.become([*passage, 5])
    for turn in range(4):
        hard.read(
            [*passage[: 8 + 4 * turn], 100 + turn]
        )  # each time further on, so that it breaks off where it was sure
    hard.read(passage[:27])
    fresh.become(hard.text)
    assert 1 - hard.odds_of(hard.end()) > 1.1 * (1 - fresh.odds_of(fresh.end()))


def test_a_guess_that_the_answer_has_contradicted_is_believed_less():
    """`old` behind 1 2 3 each time in the prompt; the answer writes `new` there, then comes to another such place."""
    old, new = 50, 60
    prompt = [10, 11, 12, 1, 2, 3, old, 20, 21, 22, 1, 2, 3, old, 23]
    quiet, renamed = Recall(), Recall()
    for recall, written in ((quiet, old), (renamed, new)):
        recall.become(prompt)
        recall.read([10, 11, 12, 1, 2, 3, written, 20, 21, 22, 1, 2, 3])
    guesses = [recall.candidates(recall.end(), 1)[0] for recall in (quiet, renamed)]
    assert [one.id for one in guesses] == [old, old]
    assert guesses[1].probability < 0.8 < guesses[0].probability


def test_all_guesses_together_are_no_more_than_certain():
    recall = Recall()
    recall.read([1, 2, 1, 3, 1, 3, 1, 4, 1])
    found = recall.candidates(recall.end(), 9)
    assert [one.id for one in found] == [3, 4, 2], "the most frequent first, then the most recent"
    assert sum(one.probability for one in found) < 1
    assert [one.probability for one in found] == sorted((one.probability for one in found), reverse=True)


def test_another_text_is_read_anew_and_a_longer_one_from_where_it_grows():
    recall = Recall()
    recall.become([1, 2, 3])
    recall.become([1, 2, 3, 1, 2])
    assert list(recall.text) == [1, 2, 3, 1, 2] and recall.candidates(recall.end(), 1)[0].id == 3
    recall.become([9, 2])
    assert list(recall.text) == [9, 2] and recall.candidates(recall.end(), 1) == []


# -- the drafter without a model --------------------------------------------------------------------------------------


def test_alone_it_guesses_what_was_written_before_and_never_makes_a_pass():
    drafter = SuffixDrafter(INFO)
    row = drafter.prefill([1, 2, 3, 4, 5, 1, 2])
    assert isinstance(drafter, Foresees)
    written = []
    for _ in range(5):
        (best, *_) = drafter.candidates(row, GREEDY, 2)
        written.append(best.id)
        assert drafter.pass_rows([(best.id, row)]) == 0
        (row,) = drafter.extend([(best.id, row)])
    assert written == [3, 4, 5, 1, 2]


def test_alone_it_follows_the_text_and_its_branches():
    drafter = SuffixDrafter(INFO)
    root = drafter.prefill([1, 2, 3, 1, 4, 5, 1])
    two, four, after = drafter.extend([(2, root), (4, root), (5, 1)])
    assert drafter.candidates(two, GREEDY, 1)[0].id == 3
    assert drafter.candidates(four, GREEDY, 1)[0].id == 5
    drafter.keep([four, after])
    assert drafter.room() == INFO.context - 9
    assert drafter.candidates(after, GREEDY, 1)[0].id == 1
    (other,) = drafter.extend([(9, after)])
    assert drafter.candidates(other, GREEDY, 4) == [Candidate(9, pytest.approx(0.01))], "a waiting verifier is not left"


def test_alone_it_says_what_does_not_fit():
    drafter = SuffixDrafter(INFO)
    with pytest.raises(ModelError, match=r"65 tokens do not fit the context of 64"):
        drafter.prefill(range(65))
    with pytest.raises(ModelError, match="empty text"):
        drafter.prefill([])


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """An exported target as a board's maker has it; its weights are none that anybody could load."""
    out = tmp_path / "target"
    out.mkdir()
    words = {word: i for i, word in enumerate(["<end>", "the", "cat", "sat"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    made.save(str(out / manifest.TOKENIZER))
    (out / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    (out / "model.safetensors").write_bytes(b"weights")
    facts = manifest.Manifest(
        kind="target",
        name="tiny",
        architecture="llama",
        source={},
        weights_digest=manifest.digest(out / "model.safetensors"),
        tokenizer_digest=manifest.digest(out / manifest.TOKENIZER),
        vocab_size=len(words),
        context=256,
        dtype="float32",
        stop_ids=(0,),
        chat_template="chat_template.jinja",
    )
    (out / manifest.MANIFEST).write_bytes(msgspec.json.encode(facts))
    return out


def board(tmp_path: Path, **drafter) -> EdgeConfig:
    return EdgeConfig(device=DeviceConfig("a.b", tmp_path / "state"), drafter=DrafterConfig(**drafter))


def test_a_board_without_a_model_needs_the_tokenizers_export_alone(exported: Path, tmp_path: Path):
    pytest.importorskip("torch", reason="the exporter needs it")
    from tools.export.__main__ import main

    ran = CliRunner().invoke(main, ["tokenizer", str(exported), str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "manifest.json",
        "tokenizer.json",
        "chat_template.jinja",
    }
    config = board(tmp_path, model=tmp_path / "out", context=100, verify_weights=True)
    drafter = load_drafter(config)
    assert isinstance(drafter, SuffixDrafter) and (drafter.info.context, drafter.info.vocab_size) == (100, 4)
    assert drafter.info.tokenizer_digest == manifest.read(exported, "target").tokenizer_digest
    assert load_text(config).stop_ids == {0}

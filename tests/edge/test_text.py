"""Text to ids and back: the template is the model's own, and a stream never shows half a character."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the tokenizer comes from a tiny model made with torch")

from edge.drafters import manifest
from edge.text import Text
from protocol.errors import ModelError
from tests.tools import tiny_models
from tools.export import sources, write

TOKENIZER = tiny_models.tokenizer()
TEXT = Text(TOKENIZER, tiny_models.TEMPLATE, {"eos_token": "<|im_end|>"}, (2, 0))


def test_chat_is_the_template_with_the_answer_opened() -> None:
    ids = TEXT.chat([{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}])
    whole = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == whole
    assert ids.count(1) == 3 and ids.count(2) == 2  # special tokens are one id each
    assert TEXT.stop_ids == {0, 2}


def test_special_tokens_are_not_shown() -> None:
    assert TEXT.decode([1, *TEXT.encode("the hat"), 2]) == "the hat"


def test_template_names_special_tokens_and_keeps_to_its_rules() -> None:
    template = "{% for m in messages %}\n  {% if m.content %}\n{{ m.content }}{{ eos_token }}{% endif %}\n{% endfor %}"
    text = Text(TOKENIZER, template, {"eos_token": "E"}, ())
    assert text.render([{"role": "user", "content": "a"}]) == "aE"


def test_refused_conversation_is_an_error_of_ours() -> None:
    text = Text(TOKENIZER, "{{ raise_exception('roles must alternate') }}", {}, ())
    with pytest.raises(ModelError, match="roles must alternate"):
        text.chat([{"role": "user", "content": "a"}])
    with pytest.raises(ModelError, match="not a chat template"):
        Text(TOKENIZER, "{% for %}", {}, ())


def test_template_cannot_leave_the_sandbox() -> None:
    text = Text(TOKENIZER, "{{ messages.__class__.__mro__[1].__subclasses__() }}", {}, ())
    with pytest.raises(ModelError, match="refuses"):
        text.chat([{"role": "user", "content": "a"}])


def test_stream_holds_a_character_until_it_is_whole() -> None:
    ids = TEXT.encode("🙂")
    assert len(ids) > 1
    stream = TEXT.stream()
    assert [stream.push([id]) for id in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert stream.flush() == ""


def test_stream_shows_at_the_end_what_was_cut() -> None:
    ids = TEXT.encode("ok 🙂")[:-1]
    stream = TEXT.stream()
    assert stream.push(ids) + stream.flush() == TEXT.decode(ids)
    assert "\ufffd" not in TEXT.stream().push(ids)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60), st.integers(0, 2**32))
def test_stream_pieces_make_the_text(text: str, seed: int) -> None:
    ids, stream, cut = TEXT.encode(text), TEXT.stream(), random.Random(seed)
    pieces = []
    while ids:
        take = cut.randint(1, 4)
        pieces.append(stream.push(ids[:take]))
        ids = ids[take:]
    assert "".join(pieces) + stream.flush() == TEXT.decode(TEXT.encode(text))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=12))
def test_stream_of_any_ids_equals_decoding_them(ids: list[int]) -> None:
    stream = TEXT.stream()
    assert stream.push(ids) + stream.flush() == TEXT.decode(ids)


def test_load_from_an_export(tmp_path: Path) -> None:
    source = sources.read(str(tiny_models.directory(tmp_path / "hf", "llama")))
    facts = write.write_target(source, tmp_path / "out")
    text = Text.load(tmp_path / "out", facts)
    messages = [{"role": "user", "content": "the cat 12"}]
    assert text.chat(messages) == TEXT.chat(messages)
    (tmp_path / "out/chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"chat_template.jinja: no chat template"):
        Text.load(tmp_path / "out", facts)
    (tmp_path / "out" / manifest.TOKENIZER).write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json: not a tokenizer"):
        Text.load(tmp_path / "out", facts)

"""Text to ids and back: the model's own tokenizer and chat template, and a stream that never cuts a character."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from edge.drafters.manifest import TOKENIZER, Manifest
from protocol.errors import ModelError

# A character that is not complete shows as U+FFFD; what stays so for this many tokens never will be.
HOLD = 16


class Text:
    """Tokenizer, chat template and stop ids of one model."""

    def __init__(self, tokenizer: Tokenizer, template: str, special_tokens: Mapping[str, str], stop_ids: Iterable[int]):
        """Raises ModelError for a template that is not valid jinja2."""
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens)
        self.stop_ids = frozenset(stop_ids)
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise ModelError(f"not a chat template: {error}", remedy="export the model again") from error

    @classmethod
    def load(cls, directory: str | Path, manifest: Manifest) -> Text:
        """Of a model directory. Raises ModelError where a file is missing or cannot be read."""
        path = Path(directory) / TOKENIZER
        template = Path(directory) / manifest.chat_template
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"not a tokenizer: {error}", where=str(path), remedy="export the model again") from error
        try:
            source = template.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ModelError(f"no chat template: {error}", where=str(template), remedy="export it again") from error
        return cls(tokenizer, source, manifest.special_tokens, manifest.stop_ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation and the opening of the answer; messages: {"role": ..., "content": ...}, oldest first.

        Raises ModelError where the template refuses the conversation.
        """
        return self.encode(self.render(messages))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as the template writes it, with the opening of the answer."""
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ModelError(
                f"the chat template refuses the conversation: {error}", remedy="check roles and contents"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Ids of a text, special tokens written in it included, none added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> Stream:
        return Stream(self)


class Stream:
    """Ids in, pieces of text out. The pieces put together are the decoded whole; none ends inside a character."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._window: list[int] = []  # one token of context, then those whose text is not all out
        self._shown = 0  # characters of the window's text

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with `ids`: it may lag behind them by part of a character."""
        return "".join(self._push(id) for id in ids)

    def _push(self, id: int) -> str:
        self._window.append(id)
        text = self._text.decode(self._window)
        certain = len(text) if len(self._window) > HOLD else len(text.rstrip("\ufffd"))
        certain = max(certain, self._shown)  # the context may be the last byte of a character, U+FFFD on its own
        piece = text[self._shown : certain]
        self._shown = certain
        if certain == len(text):
            # A leading space is dropped by some decoders, so the next token must not be the window's first.
            self._window = [id]
            self._shown = len(self._text.decode(self._window))
        return piece

    def flush(self) -> str:
        """What is left at the end: characters that were never completed, as U+FFFD."""
        rest = self._text.decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return rest


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates on the hub are written for, in a sandbox: a template is data from elsewhere."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)

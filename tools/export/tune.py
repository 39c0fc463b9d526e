"""Scales, norms and biases learned end to end on what the target wrote; levels and zero points stay as they are.

The loss is the cross entropy to a mixture of what the target wrote, which is what a drafter has to guess, and of the
given model's own distribution, which keeps it a language model. Every parameter is learned as a factor of its value,
so one learning rate fits all of them (as EfficientQAT, https://arxiv.org/abs/2407.11062, trains scales last).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tools.export.calibration_text import Corpus
from tools.export.forward import Decoder, plain
from tools.export.quantise import Blocks, dequantise, levels
from tools.export.quantised import EMBEDDING, HEAD, Progress, embedded, head

STEP = 768  # tokens that a step of the optimiser sees
PASSES = 2  # through the corpus, each in another order
RATE = 1e-3  # of a parameter's value, a step
WRITTEN = 0.5  # the share of what the target wrote in what is learned
ROWS = 256  # that logits are made for at once
SAVE_EVERY = 4  # steps


class Product(torch.autograd.Function):
    """x [tokens, k] times a quantised matrix, with gradients for x and for its scales [n, groups]."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, scales: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, scales, steps)
        return functional.linear(x, _dense(scales, steps, x.shape[1]))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, scales, steps = context.saved_tensors
        return gradient @ _dense(scales, steps, x.shape[1]), _by_scales(gradient.T @ x, steps), None


class Learner:
    """A quantised model whose scales, norms and biases are factors times their values; the embedding stays as it is."""

    def __init__(self, config: Any, weights: Mapping[str, torch.Tensor], blocks: Mapping[str, Blocks]) -> None:
        self.decoder, self.weights, self.blocks = Decoder(config, weights), weights, blocks
        self.values = dict(self.decoder.vectors)
        self.steps: dict[str, torch.Tensor] = {}  # of a matrix, whole numbers of scales: [n, groups, group]
        self.learns_head = blocks[HEAD] is not blocks.get(EMBEDDING)
        fixed = (EMBEDDING,) if self.learns_head else (EMBEDDING, HEAD)
        for name, part in blocks.items():
            if name not in fixed:
                self.values[name], self.steps[name] = torch.from_numpy(part.scales), levels(part)
        self.factors = {name: torch.ones_like(value).requires_grad_() for name, value in self.values.items()}

    def head(self) -> torch.Tensor:
        """The head [vocab, hidden], as it is now."""
        if not self.learns_head:
            return dequantise(self.blocks[HEAD])
        scales = self.values[HEAD] * self.factors[HEAD].detach()
        return _dense(scales, self.steps[HEAD], self.blocks[HEAD].k)

    def learn_head(self, gradient: torch.Tensor) -> None:
        """gradient: of the loss, by the head [vocab, hidden]; it is used up."""
        self.factors[HEAD].grad = _by_scales(gradient, self.steps[HEAD]).mul_(self.values[HEAD])

    def hidden(self, texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the head multiplies, [tokens of all texts, hidden]."""
        now = {name: value * self.factors[name] for name, value in self.values.items()}
        self.decoder.vectors = {name: now[name] for name in self.decoder.vectors}
        return self.decoder.hidden(
            embedded(self.weights, self.blocks, torch.cat(list(texts))),
            [len(text) for text in texts],
            lambda name, x: Product.apply(x, now[name], self.steps[name]),
        )

    def learned(self) -> tuple[dict[str, Blocks], dict[str, torch.Tensor]]:
        """The blocks with their scales, and the vectors, as they are now."""
        now = {name: (value * self.factors[name]).detach() for name, value in self.values.items()}
        blocks = {
            name: replace(part, scales=now[name].half().float().numpy()) if name in now else part
            for name, part in self.blocks.items()
        }
        return blocks, {name: now[name] for name in self.decoder.vectors}


class Teacher:
    """The given model. What it says of a text is kept for the next pass."""

    def __init__(self, config: Any, weights: Mapping[str, torch.Tensor], texts: Sequence[torch.Tensor]) -> None:
        self._decoder, self._weights, self._texts = Decoder(config, weights), weights, texts
        self._kept: dict[int, torch.Tensor] = {}  # by a text's index, [tokens, hidden]
        self.head = head(weights).float()

    @torch.no_grad()
    def hidden(self, indices: Sequence[int]) -> torch.Tensor:
        """What the head multiplies, [tokens of these texts, hidden]."""
        if missing := [index for index in indices if index not in self._kept]:
            texts = [self._texts[index] for index in missing]
            lengths = [len(text) for text in texts]
            given = self._weights[EMBEDDING][torch.cat(texts)].float()
            made = self._decoder.hidden(given, lengths, plain(self._weights)).split(lengths)
            self._kept.update(zip(missing, (part.clone() for part in made), strict=True))
        return torch.cat([self._kept[index] for index in indices])


def tune(
    config: Any,
    weights: Mapping[str, torch.Tensor],
    blocks: Mapping[str, Blocks],
    corpus: Corpus,
    workdir: Path,
    progress: Progress | None = None,
) -> tuple[dict[str, Blocks], dict[str, torch.Tensor]]:
    """Blocks with learned scales, and the learned norms and biases, after some passes through the corpus.

    workdir: where the state is kept: a later call for the same arguments goes on from there.
    progress: called with (steps done, steps in all).
    """
    learner, teacher = Learner(config, weights, blocks), Teacher(config, weights, corpus.texts)
    lengths = [len(text) for text in corpus.texts]
    batches = [batch for seed in range(PASSES) for batch in _batches(lengths, seed)]
    optimiser = torch.optim.Adam(learner.factors.values(), lr=RATE, betas=(0.9, 0.95))
    path, done = workdir / "tuning.pt", 0
    if path.exists():
        state = torch.load(path)
        done = state["done"]
        optimiser.load_state_dict(state["optimiser"])
        with torch.no_grad():
            for name, factor in learner.factors.items():
                factor.copy_(state["factors"][name])
    for step in range(done, len(batches)):
        texts = [corpus.texts[index] for index in batches[step]]
        written = [corpus.written[index] for index in batches[step]]
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 4) * (1 - step / len(batches))
        taught, hidden = teacher.hidden(batches[step]), learner.hidden(texts)
        by_hidden, by_head = _gradients(
            hidden.detach(), taught, texts, written, learner.head(), teacher.head, learns_head=learner.learns_head
        )
        optimiser.zero_grad()
        hidden.backward(by_hidden)
        if by_head is not None:
            learner.learn_head(by_head)
        optimiser.step()
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == len(batches):
            state = {"done": step + 1, "optimiser": optimiser.state_dict(), "factors": learner.factors}
            torch.save(state, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)
        if progress:
            progress(step + 1, len(batches))
    return learner.learned()


@torch.no_grad()
def _gradients(
    hidden: torch.Tensor,
    taught: torch.Tensor,
    texts: Sequence[torch.Tensor],
    written: Sequence[int],
    matrix: torch.Tensor,
    exact: torch.Tensor,
    *,
    learns_head: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of the loss, by hidden states [tokens, hidden] and by the head if it is learned. Rows whose next token is of a
    prompt, or unknown, do not count.

    matrix, exact: the heads [vocab, hidden] of the model that learns and of the one that teaches.
    """
    ids = torch.cat(list(texts))
    ends = np.cumsum([len(text) for text in texts]).tolist()
    rows = torch.cat([torch.arange(end - count - 1, end - 1) for end, count in zip(ends, written, strict=True)])
    by_hidden, by_head = torch.zeros_like(hidden), torch.zeros_like(matrix) if learns_head else None
    for part in rows.split(ROWS):
        error = (hidden[part] @ matrix.T).softmax(-1)
        error -= (1 - WRITTEN) * (taught[part] @ exact.T).softmax(-1)
        error[torch.arange(len(part)), ids[part + 1]] -= WRITTEN
        error /= len(rows)
        by_hidden[part] = error @ matrix
        if by_head is not None:
            by_head.addmm_(error.T, hidden[part])
    return by_hidden, by_head


def _batches(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Indices of texts, about STEP tokens together, neighbours in different batches."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    batches: list[list[int]] = [[]]
    for index in order:
        if sum(lengths[other] for other in batches[-1]) >= STEP:
            batches.append([])
        batches[-1].append(index)
    return batches


def _dense(scales: torch.Tensor, steps: torch.Tensor, k: int) -> torch.Tensor:
    return (steps * scales[:, :, None]).flatten(1)[:, :k]


def _by_scales(gradient: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The gradient by a matrix's scales [n, groups], of that by the matrix [n, k], which is used up."""
    padded = functional.pad(gradient, (0, steps.shape[1] * steps.shape[2] - gradient.shape[1]))
    return padded.view(steps.shape).mul_(steps).sum(2)

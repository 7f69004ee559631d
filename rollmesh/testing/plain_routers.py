"""Routers of experts in plain torch, for the reference of the tables: given experts, and the losses of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollmesh.learner.batching.types import TrainSequence


class PlainRouters:
    """The routers of a Qwen3 with experts; of another model there are none.

    Args:
        model: of transformers; its routers are asked for logits alone from now on.

    Attributes:
        layers, experts, chosen: layers with experts, experts of each, and how many a token gets.
    """

    def __init__(self, model: nn.Module) -> None:
        gates: list[Any] = [
            module for name, module in model.named_modules() if name.endswith("mlp.gate") and hasattr(module, "top_k")
        ]
        self.layers = len(gates)
        self.experts: int = len(gates[0].weight) if gates else 0
        self.chosen: int = gates[0].top_k if gates else 0
        self._given: Tensor | None = None
        self._computed = 0
        self._logits: list[list[Tensor]] = [[] for _ in gates]
        self._chosen: list[list[Tensor]] = [[] for _ in gates]
        self._shares: list[Tensor] = []
        for number, gate in enumerate(gates):
            self._attach(gate, number)

    def prepare(self, sequence: TrainSequence) -> None:
        """Prepares a pass over all tokens of a sequence, with the experts that it brings."""
        given = np.full((len(sequence), self.layers, self.chosen), -1, dtype=np.int64)
        for first, experts in ((0, sequence.prompt_experts), (len(sequence.prompt_ids), sequence.response_experts)):
            if experts is not None:
                given[first : first + len(experts)] = experts
        self._given = torch.from_numpy(given)
        # Tokens after the last one that predicts are no part of a batch.
        self._computed = len(sequence.prompt_ids) + int(np.flatnonzero(sequence.response_mask).max())

    def balance(self) -> Tensor:
        """The loss of balance of the passes since the last call, by the loads of those before; summed over layers."""
        loss = torch.zeros(())
        shares = []
        for number in range(self.layers):
            probabilities, chosen = torch.cat(self._logits[number]).softmax(-1), torch.cat(self._chosen[number])
            if self._shares:
                loss = loss + self.experts * (self._shares[number] * probabilities.mean(0)).sum()
            shares.append(chosen.flatten().bincount(minlength=self.experts) / chosen.numel())
        self.forget()
        self._shares = shares
        return loss

    def z_loss(self) -> Tensor:
        """The loss of large logits over the passes since the last step, mean over tokens; summed over layers."""
        means = (torch.cat(layer).logsumexp(-1).square().mean() for layer in self._logits)
        return torch.stack([*means, torch.zeros(())]).sum()

    def forget(self) -> None:
        """Gives up what the passes since the last step have chosen."""
        for kept in (*self._logits, *self._chosen):
            kept.clear()

    def _attach(self, gate: Any, number: int) -> None:
        original = gate.forward

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, _, own = original(hidden)
            assert self._given is not None, "prepared"
            given = self._given[:, number]
            chosen = torch.where(given < 0, own, given)
            self._logits[number].append(logits[: self._computed])
            self._chosen[number].append(chosen[: self._computed])
            values = logits.softmax(-1).gather(-1, chosen)
            return logits, values / values.sum(-1, keepdim=True) if gate.norm_topk_prob else values, chosen

        gate.forward = forward


def with_experts(
    sequences: Sequence[TrainSequence], layers: int, experts: int, chosen: int, seed: int
) -> list[TrainSequence]:
    """The same with random experts: of all tokens but one of a prompt, and those of the last response.

    Args:
        sequences: members of a group share a prompt.
        layers, experts, chosen: layers with experts, experts of each, and how many a token gets.
        seed: of the choice.
    """
    rng = np.random.default_rng(seed)

    def draw(tokens: int) -> NDArray[np.int16]:
        return rng.random((tokens, layers, experts)).argsort(-1)[..., :chosen].astype(np.int16)

    prompts = {id(s.prompt_ids): draw(len(s.prompt_ids)) for s in sequences}
    next(iter(prompts.values()))[0] = -1
    given = [
        replace(s, prompt_experts=prompts[id(s.prompt_ids)], response_experts=draw(len(s.response_ids) - 1))
        for s in sequences
    ]
    return [*given[:-1], replace(given[-1], response_experts=None)]

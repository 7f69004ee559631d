"""Random micro-batches for tests of losses, and every registered loss with the settings that change its formula."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

import rollmesh.learner.algorithms.losses  # noqa: F401 - entering the registry
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.registry import POLICY_LOSSES, build_policy_loss
from rollmesh.learner.algorithms.settings import Component
from rollmesh.learner.algorithms.types import GlobalCounts, StepView, TokenBatch

# In addition to the defaults; a new loss is covered by its defaults without being named here.
VARIANTS: tuple[Component, ...] = (
    Component("ppo", {"dual_clip": None, "two_sided_delta": 1.5}),
    Component("gspo", {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 2.0}),
    Component("gspo", {"clip_low": 0.1, "clip_high": 0.1, "gradient": "sequence"}),
    Component("cispo", {"clip_low": 0.2, "clip_high": 0.2}),
    Component("sapo", {"level": "sequence"}),
    Component("clip_cov", {"share": 0.3, "covariance_low": -1.0}),
    Component("kl_cov", {"share": 0.3}),
    Component("probability_band", {"by_sign": False, "band_low": 0.02, "band_high": None}),
)
EVERY_LOSS = [*(Component(name) for name in POLICY_LOSSES.names), *VARIANTS]


def label(component: Component) -> str:
    """For pytest."""
    return "-".join([component.name, *(f"{key}={value}" for key, value in component.params.items())])


@dataclass
class Sample:
    """A micro-batch and two policies' log-probs of its tokens.

    Attributes:
        log_probs: [R], current policy.
        anchor: [R].
        tokens: the rest.
    """

    log_probs: Tensor
    anchor: Tensor
    tokens: TokenBatch

    @property
    def counts(self) -> GlobalCounts:
        lengths = self.tokens.sequence_lengths
        return GlobalCounts(int(lengths.sum()), int((lengths > 0).sum()))

    def to(self, dtype: torch.dtype) -> Sample:
        """In another precision."""
        changed: dict[str, Any] = {
            item.name: value.to(dtype)
            for item in fields(self.tokens)
            if isinstance(value := getattr(self.tokens, item.name), Tensor) and value.is_floating_point()
        }
        return Sample(self.log_probs.to(dtype), self.anchor.to(dtype), replace(self.tokens, **changed))

    def part(self, sequences: Tensor) -> Sample:
        """Some of its sequences as a micro-batch of their own.

        Args:
            sequences: int64 [K], ascending.
        """
        tokens = self.tokens
        own = torch.isin(tokens.sequence_ids, sequences)
        place = torch.full((tokens.num_sequences,), -1)
        place[sequences] = torch.arange(sequences.numel())
        picked: dict[str, Any] = {}
        for item in fields(tokens):
            value = getattr(tokens, item.name)
            if isinstance(value, Tensor):
                picked[item.name] = value[sequences] if item.name in PER_SEQUENCE else value[own]
        picked["sequence_ids"] = place[tokens.sequence_ids[own]]
        return Sample(self.log_probs[own], self.anchor[own], replace(tokens, **picked))


PER_SEQUENCE = ("sequence_lengths", "sequence_rewards")


def sample(
    lengths: list[int], seed: int = 0, *, drift: float = 0.5, advantages: Tensor | None = None, by_token: bool = False
) -> Sample:
    """A random micro-batch in float64.

    Args:
        lengths: trained tokens per sequence.
        seed: of all values.
        drift: standard deviation of the log-ratios.
        advantages: [R]; none: random, one per sequence.
        by_token: advantages differ within a sequence.
    """
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    total = ids.numel()

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=draw, dtype=torch.float64)

    anchor = -torch.rand(total, generator=draw, dtype=torch.float64) * 3 - 0.05
    current = torch.minimum(anchor + drift * normal(total), anchor.new_tensor(-1e-3))
    drawn = normal(total) if by_token else normal(len(lengths))[ids]
    tokens = TokenBatch(
        sequence_ids=ids,
        sequence_lengths=sizes,
        behaviour_log_probs=anchor,
        advantages=drawn if advantages is None else advantages,
        staleness=torch.zeros(total, dtype=torch.int32),
        sequence_rewards=normal(len(lengths)),
    )
    return Sample(current, anchor, tokens)


def select(component: Component, data: Sample, seed: int = 0) -> None:
    """Makes the loss's selection on the whole of `data`, where it has one."""
    _, selection, _ = build_policy_loss(component)
    if selection is not None:
        generator = torch.Generator().manual_seed(seed)
        entropy = torch.zeros_like(data.anchor)
        data.tokens.selected = selection(
            StepView(data.log_probs, entropy, data.anchor, data.tokens.advantages, generator)
        )


def token_loss(component: Component, data: Sample) -> tuple[Tensor, Tensor, Metrics]:
    """Loss per token [R] and its log-probs (leaf), and metrics; the selection must have been made."""
    function, _, _ = build_policy_loss(component)
    leaf = data.log_probs.detach().clone().requires_grad_()
    loss, metrics = function(leaf, data.anchor, data.tokens)
    return loss, leaf, metrics


def gradient(scalar: Tensor, leaf: Tensor) -> Tensor:
    """d scalar / d leaf; the graph stays for further calls."""
    (found,) = torch.autograd.grad(scalar, leaf, retain_graph=True)
    return found

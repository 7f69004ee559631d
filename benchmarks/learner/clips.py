"""The clips that act: the change of the real gradient when a setting of the loss changes, for every algorithm by name.

    python -m benchmarks.learner.clips                        # one optimizer step per batch, data up to 4 versions old
    python -m benchmarks.learner.clips --minibatches 4 --only grpo gspo

A batch of stale tokens, the policy a table of logits, goes through the algorithm's batch stage and loss. Then one
numeric setting of the loss (or the critic's clip) is set to other values, from tight to wide. The result is the largest
change of any token's gradient, in shares of the largest gradient. 0 is a setting without effect, and the run says so at
its start (`Algorithm.notices`). The exit status is 1 where the two disagree.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import table
from rollmesh.learner.algorithms.dataflows.actor_critic import ActorCritic
from rollmesh.learner.algorithms.dataflows.policy_gradient import PolicyGradient
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.registry import ALGORITHMS, POLICY_LOSSES, keyword_settings
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import Rollouts, StepView, UpdatePlan
from tests.learner.algorithms.memory_batch import MemoryBatch

# From tight to wide; those out of a setting's range are left out.
_OTHERS = (1e-3, 0.9, 1.5)
_ZERO = 1e-9
_DRIFT = 0.8
_MOVED = 0.5


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one setting.

    Attributes:
        key: of the configuration.
        change: largest change of the gradient, in shares of its largest value.
        said: the run says that it has no effect.
    """

    key: str
    change: float
    said: bool

    @property
    def agrees(self) -> bool:
        """True where the run's notices say what happens."""
        return (self.change < _ZERO) == self.said


def effects(
    name: str, params: Mapping[str, Any], plan: UpdatePlan, *, until_one_acts: bool = False
) -> Iterator[Effect]:
    """Effects of every numeric setting in use of the algorithm's loss, and of its critic's clip.

    Args:
        name, params, plan: of the algorithm.
        until_one_acts: no further value of a setting is tried then.
    """
    algorithm = _load(name, params, plan)
    said = " ".join(algorithm.notices())
    loss = algorithm.settings.loss
    settings = keyword_settings(POLICY_LOSSES.get(loss.name, "loss").target, loss.params)
    batch = staged(algorithm)
    unchanged = {role: gradient(algorithm, batch, role) for role in algorithm.losses(plan.steps)}
    measured = [("actor", "loss", key, value) for key, value in settings.items()]
    if isinstance(algorithm, ActorCritic):
        measured.append(("critic", "value", "clip", algorithm.settings.value.clip))
    for role, part, key, value in measured:
        if isinstance(value, bool | int | float):
            before, change = unchanged[role], 0.0
            for other in (not value,) if isinstance(value, bool) else _OTHERS:
                if until_one_acts and change > _ZERO:
                    break
                with contextlib.suppress(SettingsError):
                    changed = _load(name, _with(params, part, {key: other}), plan)
                    difference = gradient(changed, batch, role) - before
                    change = max(change, float(difference.abs().max() / before.abs().max()))
            yield Effect(f"{part}.{key}", change, f"algorithm.{part}.{key}" in said)


def staged(algorithm: PolicyGradient) -> MemoryBatch:
    """A stale batch after the batch stage; where several optimizer steps follow, all of them but the last are done."""
    batch = stale_batch()
    algorithm.batch_stage(batch)
    if algorithm.plan.updates > 1:
        draw = torch.Generator().manual_seed(2)
        for tables in (batch.logits, batch.tables):
            for role, values in tables.items():
                tables[role] = values + _MOVED * torch.randn(values.shape, generator=draw, dtype=torch.float64)
    return batch


def gradient(algorithm: PolicyGradient, batch: MemoryBatch, role: str) -> Tensor:
    """The gradient of the loss with respect to a role's table."""
    tables = batch.tables if role in batch.tables else batch.logits
    leaf = tables[role] = tables[role].detach().requires_grad_()
    tokens = batch.token_batch()
    if algorithm.needs.selection:
        log_probs, entropy = (part.detach() for part in batch.output("actor").policy())
        anchor = log_probs if tokens.proximal_log_probs is None else tokens.proximal_log_probs
        view = StepView(log_probs, entropy, anchor, tokens.advantages, torch.Generator().manual_seed(0))
        tokens.selected = algorithm.select(view)
    loss = algorithm.losses(version=algorithm.plan.steps)[role]
    (found,) = torch.autograd.grad(loss(batch.output(role), tokens, batch.counts()).loss, leaf)
    return found


def stale_batch(groups: int = 4, size: int = 4, length: int = 6, vocabulary: int = 5) -> MemoryBatch:
    """Tokens that another policy sampled, some of them several versions ago."""
    draw = torch.Generator().manual_seed(1)
    count, total = groups * size, groups * size * length

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    actor, tokens = normal(total, vocabulary), torch.randint(vocabulary, (total,), generator=draw)
    sampled_by = (actor + _DRIFT * normal(total, vocabulary)).log_softmax(-1)
    rewards = normal(count)
    rollouts = Rollouts(
        group_ids=torch.arange(groups).repeat_interleave(size),
        rewards=rewards,
        lengths=torch.full((count,), length),
        behaviour_log_probs=sampled_by.gather(1, tokens[:, None])[:, 0],
        staleness=torch.randint(1, 5, (total,), generator=draw).int(),
        truncated=torch.zeros(count, dtype=torch.bool),
        components={"first": rewards, "second": normal(count)},
        baseline_rewards=normal(count),
    )
    others = {role: actor + normal(total, vocabulary) for role in ("reference", "prm", "teacher")}
    return MemoryBatch(rollouts, tokens, {"actor": actor, **others}, {"critic": normal(total)})


def _load(name: str, params: Mapping[str, Any], plan: UpdatePlan) -> PolicyGradient:
    algorithm = load_algorithm(name, params, plan)
    assert isinstance(algorithm, PolicyGradient)
    return algorithm


def _with(params: Mapping[str, Any], part: str, change: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with another one in a part of theirs."""
    now = params.get(part, {})
    return {**params, part: {**({"name": now} if isinstance(now, str) else now), **change}}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row per setting."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learner.clips", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS.names, default=ALGORITHMS.names)
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-staleness", type=int, default=4)
    args = parser.parse_args(argv)
    plan = UpdatePlan(
        minibatches=args.minibatches,
        epochs=args.epochs,
        max_staleness=args.max_staleness,
        max_response_tokens=6,
        group_size=4,
        steps=1000,
    )
    found = [(name, effect) for name in args.only for effect in effects(name, {}, plan)]
    rows = [
        (name, f"`{effect.key}`", f"{effect.change:.2g}", "without effect" if effect.said else "", _verdict(effect))
        for name, effect in found
    ]
    print(table(("algorithm", "setting", "change of the gradient", "said at start", ""), rows))
    return int(not all(effect.agrees for _, effect in found))


def _verdict(effect: Effect) -> str:
    if effect.agrees:
        return ""
    return "WRONG: it acts" if effect.said else "DEAD, and not said"


if __name__ == "__main__":
    sys.exit(main())

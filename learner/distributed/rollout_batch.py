"""The batch as an algorithm sees it (`learner.algorithms.interface.Batch`): all rollouts on every rank, and the models.

Invariants: every method is collective. After it all processes hold the same values, in the order of the plan's members,
whichever has computed them. Models may be divided over the processes in different ways. Fields that the algorithm fills
in are the leader's before they are trained on. One process communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.interface import Algorithm, Loss
from rollmesh.learner.algorithms.types import ModelOutput, Rollouts, StepView
from rollmesh.learner.batching.pack import response_lengths, sampled_values, token_rewards, trained_mask
from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import PackedBatch, TrainSequence
from rollmesh.learner.distributed.batch_agreement import agree_on_values
from rollmesh.learner.distributed.batch_sequences import gather_batch
from rollmesh.learner.distributed.mismatch import (
    Mismatch,
    MismatchMeter,
    any_fresh_response,
    fresh_responses,
    mismatch_of,
)
from rollmesh.learner.distributed.rank_batch import Integers, OptimizerStep, RankBatch
from rollmesh.learner.distributed.role_batch import EngineBatch, RoleBatch, RoleElsewhere
from rollmesh.learner.distributed.step_meter import StepMeter
from rollmesh.learner.distributed.token_values import BatchTokens, PolicyLogProbs
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.learner.engines.interface import ACTOR, Engine, StepResult
from rollmesh.learner.engines.schedule import RunStep
from rollmesh.mesh.errors import ConfigError

_EXTRA = "extra."
_PER_SEQUENCE = ("rewards", "repeats")
# Spreads the versions of a run over the seeds of torch's generators.
_VERSION_STRIDE = 0x9E3779B97F4A7C15


class RolloutBatch:
    """A batch over all ranks.

    Args:
        plan: of the batch.
        sequences: of this process, by their index in the plan.
        engines: by role.
        kinds: by role, `language_model` or `value_model`.
        before_update: called between gradient and update of every step; asks for the claim the first time. Where it
            raises, the gradient is given up.
        token_budget: tokens per micro-batch.
        seed: of the run.
        base_roles: those whose model is the actor's without its adapter.
        elsewhere: roles whose models other processes hold.
        begins_at: see `Algorithm`.
    """

    def __init__(
        self,
        plan: TrainPlan,
        sequences: Mapping[int, TrainSequence],
        engines: Mapping[str, Engine],
        kinds: Mapping[str, str],
        before_update: Callable[[], None],
        *,
        token_budget: int,
        seed: int,
        base_roles: Collection[str] = (),
        elsewhere: Mapping[str, RoleElsewhere] = MappingProxyType({}),
        begins_at: Callable[[str], int] = lambda _role: 0,
    ) -> None:
        self._plan = plan
        self._begins_at = begins_at
        self._before_update = before_update
        self._device = engines[ACTOR].device
        # On the CPU, also for CUDA: draws do not depend on the device, and `torch.multinomial` refuses another one's.
        self._generator = torch.Generator().manual_seed((seed + plan.version * _VERSION_STRIDE) % (1 << 63))
        self.metrics: dict[str, float] = {}
        self.results: dict[str, list[StepResult]] = {}
        self.mismatch: Mismatch | None = None
        self.meter = StepMeter(engines)
        actor = self._actor = engines[ACTOR]
        own = [sequences[member] for member in plan.members_of(actor.layout)]
        mask = trained_mask(own)
        lengths = self._gather_lengths(own, mask)
        self._rank_batches = {
            layout: RankBatch(plan, layout, sequences, lengths, actor.device, token_budget)
            for layout in {engine.layout for engine in engines.values()}
        }
        here = {
            role: EngineBatch(
                plan, engine, kinds[role], self._rank_batches[engine.layout], adapter=role not in base_roles
            )
            for role, engine in engines.items()
        }
        self._actor_batch = here[ACTOR]
        self._roles: dict[str, RoleBatch] = {**here}
        if elsewhere:
            every = gather_batch(plan, actor, own)
            self._roles |= {role: other.open_batch(every, plan.minibatches) for role, other in elsewhere.items()}
        self._rollouts = self._gather_rollouts(own, mask, lengths)
        self._can_compare = any_fresh_response(self._rollouts)
        self._policy_log_probs = PolicyLogProbs(self._rollouts.num_tokens, actor.device)

    @property
    def rollouts(self) -> Rollouts:
        return self._rollouts

    def gather_tokens(self) -> BatchTokens:
        """The values of the batch's tokens, as they were trained; collective, once the updates are done."""
        self._policy_log_probs.gather(self._actor.world)
        return BatchTokens(self._plan, self._rollouts, self._policy_log_probs.values)

    @property
    def minibatches(self) -> int:
        """Optimizer steps per pass."""
        return self._plan.minibatches

    @property
    def version(self) -> int:
        return self._plan.version

    @property
    def generator(self) -> torch.Generator:
        return self._generator

    def infer(self, role: str, *, sum_pi_squared: bool = False) -> ModelOutput:
        output = self._infer(role, range(self.minibatches), sum_pi_squared=sum_pi_squared)
        if role == ACTOR and self.mismatch is None:
            log_probs, _ = output.policy()
            self._policy_log_probs.take_all(log_probs)
            self.mismatch = mismatch_of(log_probs, self._rollouts) if self._can_compare else Mismatch()
        return output

    def train(self, role: str, loss: Loss) -> None:
        for step in self.steps(role):
            self.update(role, loss, step)

    def report(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update({name: float(value) for name, value in metrics.items()})

    def steps(self, role: str, *, skip_zero_advantage: bool = False) -> list[OptimizerStep]:
        """A role's optimizer steps on the rollouts as they are now, one per minibatch.

        Raises:
            ConfigError: the algorithm left a field of the wrong size, or names a role that it does not need.
        """
        work = self._role(role)
        self._adopt_leader()
        _check_shapes(self._rollouts)
        return work.steps(self._rollouts, skip_zero_advantage=skip_zero_advantage)

    def update(self, role: str, loss: Loss, step: OptimizerStep) -> None:
        """One optimizer step; the model stays as it is where `before_update` raises."""
        work = self._role(role)
        watched = role == ACTOR and self.mismatch is None
        mismatch = MismatchMeter(self._actor) if watched and self._can_compare else None
        if role == ACTOR:
            loss = self._policy_log_probs.watching(step, loss)
        try:
            with self.meter.timing("update", role):
                work.accumulate(step, mismatch.watching(loss) if mismatch else loss)
            self.meter.count_update(role, step.batches)
            if watched:
                self.mismatch = mismatch.total(self._fresh_micro_batch) if mismatch else Mismatch()
            self._before_update()
        except BaseException:
            # Also an interrupt: a gradient that stays would be added to that of the next step.
            work.discard()
            raise
        with self.meter.timing("update", role):
            at = RunStep.of(self.version, self._plan.end, begins_at=self._begins_at(role))
            self.results.setdefault(role, []).append(work.apply(at))

    def select(self, algorithm: Algorithm, minibatch: int, step: OptimizerStep) -> None:
        """Shows the algorithm a whole minibatch under the current policy; fills `TokenBatch.selected`."""
        log_probs, entropy = self._infer(ACTOR, [minibatch]).policy()
        rollouts = self._rollouts
        view = self._rank_batches[self._actor.layout].minibatch_view(minibatch, step, rollouts)
        anchor = log_probs if rollouts.proximal_log_probs is None else rollouts.proximal_log_probs
        advantages = torch.zeros_like(log_probs) if rollouts.advantages is None else rollouts.advantages
        indices = view.token_indices
        selected = algorithm.select(
            StepView(log_probs[indices], entropy[indices], anchor[indices], advantages[indices], self._generator)
        )
        replaced = agree_on_values(self._actor, {"selected": selected})
        selected = selected if (agreed := replaced.get("selected")) is None else agreed
        for batch, positions in zip(step.batches, view.positions, strict=True):
            batch.tokens.selected = selected[positions]

    def _adopt_leader(self) -> None:
        """Replaces values that differ in some process by the leader's."""
        rollouts = self._rollouts
        replaced = agree_on_values(self._actor, {name: values for name, values, _ in _stage_outputs(rollouts)})
        for name, values in replaced.items():
            if not name.startswith(_EXTRA):
                setattr(rollouts, name, values)
            elif values is None:
                rollouts.extra.pop(name.removeprefix(_EXTRA), None)
            else:
                rollouts.extra[name.removeprefix(_EXTRA)] = values
        if replaced:
            self.report({"ranks/differing": float(len(replaced))})

    def _role(self, role: str) -> RoleBatch:
        work = self._roles.get(role)
        if work is None:
            raise ConfigError(
                f"the algorithm uses the role {role!r}, which it does not name in its needs",
                hint=f"roles: {', '.join(self._roles)}; add it to Needs.roles",
            )
        return work

    def _fresh_micro_batch(self) -> PackedBatch | None:
        """One of this rank's planned micro-batches with a response that the trained version has sampled."""
        fresh = fresh_responses(self._rollouts).cpu().numpy()
        micro = self._rank_batches[self._actor.layout].planned_with(fresh)
        return None if micro is None else micro.pack(self._rollouts)

    def _infer(self, role: str, minibatches: Sequence[int], *, sum_pi_squared: bool = False) -> ModelOutput:
        work = self._role(role)
        with self.meter.timing("infer", role):
            return work.infer(self._rollouts, minibatches, sum_pi_squared=sum_pi_squared)

    def _gather_lengths(self, own: Sequence[TrainSequence], mask: NDArray[np.bool_]) -> Integers:
        """Trained tokens of every sequence of the batch, int64 [S], from those of the actor's ranks."""
        owner = np.repeat(np.arange(len(own)), response_lengths(own))
        counts = to_device(np.bincount(owner[mask], minlength=len(own)), self._device)
        lengths = torch.zeros(len(self._plan.members), dtype=torch.int64)
        order = self._plan.rank_order(self._actor.layout)
        lengths[torch.from_numpy(order)] = torch.cat(self._actor.gather(counts)).cpu()
        return lengths.numpy()

    def _gather_rollouts(self, own: Sequence[TrainSequence], mask: NDArray[np.bool_], lengths: Integers) -> Rollouts:
        plan, device = self._plan, self._device
        behaviour, staleness = (to_device(values, device) for values in sampled_values(own, mask))
        probabilities = [plan.prompts[member.prompt].probability for member in plan.members]
        baselines = [plan.prompts[member.prompt].baseline_reward for member in plan.members]

        def per_sequence(values: Sequence[float | None]) -> Tensor:
            return to_device(np.array(values, np.float32), device)

        return Rollouts(
            group_ids=to_device(np.array([member.prompt for member in plan.members], np.int64), device),
            rewards=per_sequence([member.reward for member in plan.members]),
            lengths=to_device(lengths, device),
            behaviour_log_probs=self._actor_batch.gather_tokens(behaviour),
            staleness=self._actor_batch.gather_tokens(staleness),
            truncated=to_device(np.array([member.truncated for member in plan.members], np.bool_), device),
            data_sources=[plan.prompts[member.prompt].data_source for member in plan.members],
            components={
                name: per_sequence([member.components[position] for member in plan.members])
                for position, name in enumerate(plan.components)
            },
            baseline_rewards=None if None in baselines else per_sequence(baselines),
            probabilities=None if all(p == 1.0 for p in probabilities) else per_sequence(probabilities),
            token_rewards=self._gather_token_rewards(own, mask),
        )

    def _gather_token_rewards(self, own: Sequence[TrainSequence], mask: NDArray[np.bool_]) -> Tensor | None:
        """Rewards of the batch's trained tokens, float32 [R]; None where no process has any."""
        rewards = token_rewards(own, mask)
        some = to_device(np.array([rewards is not None], np.int32), self._device)
        if not torch.cat(self._actor.gather(some)).any():
            return None
        if rewards is None:
            rewards = np.zeros(int(mask.sum()), np.float32)
        return self._actor_batch.gather_tokens(to_device(rewards, self._device))


def _stage_outputs(rollouts: Rollouts) -> list[tuple[str, Tensor | None, tuple[int]]]:
    """Name, value and declared shape of the fields that a batch stage may fill in."""
    tokens, sequences = (rollouts.num_tokens,), (rollouts.num_sequences,)
    return [
        ("advantages", rollouts.advantages, tokens),
        ("returns", rollouts.returns, tokens),
        ("values", rollouts.values, tokens),
        ("proximal_log_probs", rollouts.proximal_log_probs, tokens),
        ("reference_log_probs", rollouts.reference_log_probs, tokens),
        ("importance_weights", rollouts.importance_weights, tokens),
        ("keep", rollouts.keep, tokens),
        ("rewards", rollouts.rewards, sequences),
        ("repeats", rollouts.repeats, sequences),
        *((f"{_EXTRA}{name}", values, tokens) for name, values in rollouts.extra.items()),
    ]


def _check_shapes(rollouts: Rollouts) -> None:
    """Checks the sizes of the fields that a batch stage has filled in against those that `Rollouts` declares.

    Raises:
        ConfigError: names the field.
    """
    for name, values, size in _stage_outputs(rollouts):
        if values is not None and values.shape != size:
            raise ConfigError(
                f"the algorithm's batch stage left `{name}` with the shape {tuple(values.shape)}, expected {size}: one "
                f"value per {'sequence' if name in _PER_SEQUENCE else 'trained token'}",
                hint="`rollouts.per_token(values)` makes values per token of values per sequence",
            )

"""Groups, a worker, and an algorithm that uses everything the learner provides; also one of two ranks of it.

Rank 1 comes to other results in its stages, as sums on a GPU or a user's code may. It must train those of rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmesh.learner.algorithms.aggregation import aggregate
from rollmesh.learner.algorithms.interface import Algorithm, Batch, Loss
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.settings import Settings
from rollmesh.learner.algorithms.types import (
    GlobalCounts,
    LossOutput,
    ModelOutput,
    ModelRole,
    Needs,
    Rollouts,
    StepView,
    TokenBatch,
    UpdatePlan,
)
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.distributed.role_batch import RoleElsewhere
from rollmesh.learner.distributed.step_profiler import StepProfiler
from rollmesh.learner.distributed.train_plan import TrainPlan, plan_training
from rollmesh.learner.distributed.trajectories import InlineTrajectories
from rollmesh.learner.distributed.worker import TrainResult, Worker, WorkerRules
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.rollouts.group import SampledGroup, decode_group
from rollmesh.mesh.config.learner import OptimizerSection, ProfileSection
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.mesh.trajectory.payload_codec import Trajectory, encode
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2, trajectory_pb2
from rollmesh.testing.worlds import Harness
from tests.learner.engines.models import VOCABULARY, make_spec
from tests.learner.failing_ranks import save_where_ranks_fail, train_without_what_rank_1_cannot_read

LINEAGE = Lineage(((1, 0),))
VERSION = 5
OPTIMIZER = OptimizerSection(lr=1e-2, max_grad_norm=1e9, eps=1e-2)
"""Its epsilon is large, so that equal gradients make equal weights: a step is no function of a gradient's sign."""
_SCORED, _ERROR = trajectory_pb2.OUTCOME_SCORED, trajectory_pb2.OUTCOME_ERROR


def member(index: int, tokens: int, reward: float = 0.0, *, scored: bool = True, **fields: Any) -> Any:
    """Metadata of a member."""
    return trajectory_pb2.MemberMeta(
        member=index,
        outcome=_SCORED if scored else _ERROR,
        reward=reward,
        prompt_tokens=3,
        response_tokens=tokens,
        **fields,
    )


def make_group(number: int, members: Sequence[Any], rng: np.random.Generator, *, greedy: int = 0) -> SampledGroup:
    """A leased group with random tokens; long responses have a gap that is not trained."""
    task = trajectory_pb2.PromptTask(
        prompt_ids=rng.integers(3, VOCABULARY, 3).astype("<i4").tobytes(),
        n=len(members),
        greedy=greedy,
        sampling=trajectory_pb2.SamplingParams(temperature=1.0),
    )
    payloads = []
    for meta in members:
        count = meta.response_tokens
        mask = np.ones(count, dtype=np.uint8)
        if count > 3:
            mask[1] = 0
        runs = VersionRuns.merged((1, PolicyVersion(1, 3 + int(i > count // 2))) for i in range(count))
        ids = rng.integers(3, VOCABULARY, count).astype(np.int32)
        trajectory = Trajectory(ids, rng.normal(-3.0, 0.5, count).astype(np.float32) * mask, mask, runs)
        payloads.append(encode(trajectory) if meta.outcome == _SCORED else b"")
    leased = buffer_pb2.LeasedGroup(group_id=f"g{number}", lease_id="l", task=task, members=members)
    return decode_group(leased, payloads)


def make_groups(seed: int = 0, groups: int = 6, members: int = 3, longest: int = 9) -> list[SampledGroup]:
    """Groups of members with random rewards and components; the second member of every third group has no reward."""
    rng = np.random.default_rng(seed)
    return [
        make_group(
            number,
            [
                member(
                    index,
                    int(rng.integers(1, longest + 1)),
                    float(rng.normal()),
                    scored=not (number % 3 == 0 and index == 1),
                    components={"style": float(index)},
                    finish_reason=trajectory_pb2.FINISH_REASON_LENGTH if index == 2 else 0,
                )
                for index in range(members)
            ],
            rng,
        )
        for number in range(groups)
    ]


def make_plan(
    groups: Sequence[SampledGroup],
    *,
    token_budget: int = 1 << 20,
    minibatches: int = 1,
    dp_sizes: Collection[int] = (1,),
) -> TrainPlan:
    return plan_training(
        groups, version=VERSION, lineage=LINEAGE, token_budget=token_budget, minibatches=minibatches, dp_sizes=dp_sizes
    )


def make_worker(
    algorithm: Algorithm,
    engines: Mapping[str, Engine],
    groups: Sequence[SampledGroup] | InlineTrajectories,
    folder: Path,
    *,
    epochs: int = 1,
    token_budget: int = 1 << 20,
    elsewhere: Mapping[str, RoleElsewhere] = MappingProxyType({}),
) -> Worker:
    held = groups if isinstance(groups, InlineTrajectories) else InlineTrajectories()
    if not isinstance(groups, InlineTrajectories):
        held.set_batch(groups)
    store = CheckpointStore(folder)
    profiler = StepProfiler(ProfileSection(), engines["actor"].device, folder / "profile")
    rules = WorkerRules(epochs=epochs, token_budget=token_budget, seed=3, profiler=profiler)
    return Worker(engines, algorithm, held, store, rules, elsewhere=elsewhere)


def make_engines(model: Path, algorithm: Algorithm) -> dict[str, Engine]:
    """Engines of an algorithm's roles."""
    engines = {"actor": create_engine(make_spec(model, optimizer=OPTIMIZER))}
    for role in algorithm.needs.roles:
        spec = make_spec(model, optimizer=OPTIMIZER if role.trained else None)
        engines[role.name] = create_engine(spec, model_type=role.kind)
    return engines


def weights(engine: Engine) -> dict[str, Tensor]:
    """Full weights by name; collective."""
    return {name: tensor.clone() for name, tensor in engine.export_weights(torch.float32)}


class Plain(Algorithm):
    """Mean-centred rewards, REINFORCE; `change` alters the rollouts at the end of the batch stage."""

    def __init__(self, change: Callable[[Rollouts], None] = lambda _: None, *, silent: bool = True) -> None:
        super().__init__(Settings(), UpdatePlan())
        self._change = change
        self._silent = silent

    @property
    def silent_without_advantage(self) -> bool:
        return self._silent

    def batch_stage(self, batch: Batch) -> None:
        rollouts = batch.rollouts
        rollouts.advantages = rollouts.per_token(rollouts.rewards - rollouts.rewards.mean())
        self._change(rollouts)

    def loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        log_probs, _ = output.policy()
        share = aggregate(-tokens.advantages * log_probs, tokens, counts, "seq_mean_token_mean")
        share = share + aggregate(-tokens.advantages * log_probs, tokens, counts, "token_mean")
        return LossOutput(share, Metrics())


class Probe(Algorithm):
    """A critic, a frozen and an online reward model, rejected tokens, resampling, selection, and state."""

    def __init__(self, plan: UpdatePlan | None = None) -> None:
        super().__init__(Settings(), plan or UpdatePlan())
        self.batches = 0
        self.history: list[float] = []

    @property
    def needs(self) -> Needs:
        roles = (
            ModelRole("critic", kind="value_model", trained=True),
            ModelRole("reference"),
            ModelRole("scorer", trained=True),
        )
        return Needs(roles=roles, selection=True)

    @property
    def silent_without_advantage(self) -> bool:
        return True

    def batch_stage(self, batch: Batch) -> None:
        rollouts = batch.rollouts
        seen = batch.infer("actor", sum_pi_squared=True)
        rollouts.proximal_log_probs, rollouts.sum_pi_squared = seen.log_probs, seen.sum_pi_squared
        rollouts.reference_log_probs = batch.infer("reference").log_probs
        batch.train("scorer", self.scorer_loss)
        rollouts.extra["scores"], _ = batch.infer("scorer").policy()
        values = batch.infer("critic").values
        assert values is not None
        assert rollouts.sum_pi_squared is not None
        rewards = rollouts.rewards + 0.1 * rollouts.components["style"] - rollouts.truncated.float()
        sequences = rollouts.sequence_ids
        rollouts.values, rollouts.returns = values, rewards[sequences] * (1 + rollouts.staleness)
        advantages = rollouts.returns - values + rollouts.sum_pi_squared
        rollouts.advantages = torch.where(sequences % 4 == 1, 0.0, advantages)
        rollouts.keep = rollouts.behaviour_log_probs < -2.6
        rollouts.repeats = torch.bincount(
            torch.randint(rollouts.num_sequences, (rollouts.num_sequences,), generator=batch.generator),
            minlength=rollouts.num_sequences,
        )
        self.batches += 1
        self.history.append(float(rollouts.rewards.sum()))
        if _differs():
            rollouts.advantages, rollouts.keep = rollouts.advantages + 1.0, None
            rollouts.repeats = rollouts.repeats.roll(1)
            rollouts.extra = {"scores": -rollouts.extra["scores"], "more": rollouts.values}
            self.history.append(0.0)
        batch.report(
            {"probe/advantage": float(advantages.double().mean()), "probe/repeated": float(rollouts.repeats.max())}
        )

    def select(self, view: StepView) -> Tensor:
        covariance = (view.log_probs - view.log_probs.mean()) * (view.advantages - view.advantages.mean())
        noise = torch.rand(covariance.shape, generator=view.generator)
        return torch.sigmoid(covariance - covariance.mean()) + noise + view.entropy - view.anchor_log_probs + _differs()

    def losses(self, version: int) -> Mapping[str, Loss]:
        return {"critic": self.value_loss, "actor": self.loss} if version >= VERSION else {"critic": self.value_loss}

    def value_loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        assert output.values is not None
        assert tokens.returns is not None
        assert tokens.old_values is not None
        error = (output.values - tokens.returns).square() + 0.1 * (output.values - tokens.old_values).square()
        return LossOutput(aggregate(error, tokens, counts, "token_mean"), Metrics())

    def scorer_loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        log_probs, _ = output.policy()
        target = tokens.sequence_rewards[tokens.sequence_ids]
        return LossOutput(aggregate((log_probs - target).square(), tokens, counts, "seq_mean_token_sum"), Metrics())

    def loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        log_probs, _ = output.policy()
        assert tokens.proximal_log_probs is not None
        assert tokens.reference_log_probs is not None
        assert tokens.selected is not None
        ratio = torch.exp(log_probs - tokens.proximal_log_probs)
        weight = tokens.advantages * tokens.selected * torch.exp(0.1 * (tokens.extra["scores"] - log_probs.detach()))
        token_loss = -ratio * weight * (1 + 0.01 * tokens.reference_log_probs)
        metrics = Metrics(sums={"probe/ratio": ratio.detach().sum()})
        return LossOutput(aggregate(token_loss, tokens, counts, "seq_mean_token_mean"), metrics)

    def state(self) -> dict[str, Any]:
        return {"batches": self.batches, "history": self.history}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.batches, self.history = int(state["batches"]), list(state["history"])


def _differs() -> bool:
    return os.environ.get("RANK") == "1"


def train_probe(
    model: Path, folder: Path, *, token_budget: int
) -> tuple[dict[str, dict[str, Tensor]], TrainResult, Worker, dict[str, Engine], Probe]:
    """Trains the probe on two minibatches, twice; gives the weights of what is trained."""
    algorithm, groups = Probe(), make_groups()
    engines = make_engines(model, algorithm)
    worker = make_worker(algorithm, engines, groups, folder, epochs=2, token_budget=token_budget)
    worker.prepare(make_plan(groups, token_budget=token_budget, minibatches=2, dp_sizes=worker.dp_sizes))
    result = worker.train(lambda: None)
    seen = {role: weights(engine) for role, engine in engines.items() if engine.trained}
    return seen, result, worker, engines, algorithm


def with_token_rewards(groups: Sequence[SampledGroup]) -> list[SampledGroup]:
    """The groups; the last response of the last one has rewards of its tokens: 1, 2, ..."""
    *others, last = groups
    *members, rewarded = last.members
    assert rewarded.trajectory is not None
    rewards = np.arange(1, len(rewarded.trajectory) + 1, dtype=np.float32)
    trajectory = replace(rewarded.trajectory, token_rewards=rewards)
    return [*others, replace(last, members=[*members, replace(rewarded, trajectory=trajectory)])]


def seen_token_rewards(actor: Engine, folder: Path) -> list[list[float] | None]:
    """Rewards of tokens as an algorithm sees them: of a batch with some, and of one without."""
    seen: list[list[float] | None] = []

    def look(rollouts: Rollouts) -> None:
        seen.append(None if rollouts.token_rewards is None else rollouts.token_rewards.tolist())

    for place, groups in enumerate((with_token_rewards(make_groups()), make_groups())):
        worker = make_worker(Plain(look), {"actor": actor}, groups, folder / str(place))
        worker.prepare(make_plan(groups, dp_sizes=worker.dp_sizes))
        worker.train(lambda: None)
    return seen


def train_on_two_ranks(harness: Harness, model: Path, out: Path) -> dict[str, Any]:
    """One of two ranks: trains the probe, then plays the scenes in which one of them fails."""
    del harness  # the worker closes its engines
    seen, result, worker, engines, algorithm = train_probe(model, out / "checkpoints", token_budget=40)
    path = worker.begin_checkpoint(PolicyVersion(1, VERSION + 1), {}).result(240)
    told = save_where_ranks_fail(engines, out)
    groups, held = make_groups(), InlineTrajectories()
    held.set_batch(groups)
    plain = make_worker(Plain(), {"actor": engines["actor"]}, held, out / "plain")
    failing = train_without_what_rank_1_cannot_read(plain, held, groups, lambda some: make_plan(some, dp_sizes=(2,)))
    rewarded = seen_token_rewards(engines["actor"], out / "rewarded")
    worker.close()
    return {
        "rewarded": rewarded,
        "weights": seen,
        "metrics": result.metrics,
        "checkpoint": str(path),
        "told": told,
        "failing": failing,
        "state": algorithm.state(),
    }

"""One rank's part of the training: its share of a plan becomes packed micro-batches, then optimizer steps.

Invariants: every method is collective. All ranks call the same methods in the same order with the same plan. So each
optimizer step and each checkpoint sees all of them. A rank without a share of a minibatch takes part with nothing.
A batch that is refused has changed neither weights nor algorithm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import Packing, TrainSequence
from rollmesh.learner.checkpoint.compatibility import algorithm_name, algorithm_state, check_form, trained_form
from rollmesh.learner.checkpoint.store import CheckpointStore, load_checkpoint
from rollmesh.learner.distributed.batch_agreement import agree_on_state
from rollmesh.learner.distributed.mismatch import Mismatch
from rollmesh.learner.distributed.prompt_images import PromptImageSource
from rollmesh.learner.distributed.rank_payloads import Unusable, gather_sequences
from rollmesh.learner.distributed.role_batch import RoleElsewhere
from rollmesh.learner.distributed.roles_memory import RolesMemory
from rollmesh.learner.distributed.rollout_batch import RolloutBatch
from rollmesh.learner.distributed.routed_experts import ExpertSource
from rollmesh.learner.distributed.step_profiler import StepProfiler
from rollmesh.learner.distributed.token_values import BatchTokens
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.learner.distributed.trajectories import TrajectorySource
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.mesh.config.learner import EngineSection
from rollmesh.mesh.trajectory.versions import PolicyVersion

# Names of the engine's own metrics where the field has its own word for them.
_METRIC_NAMES = {"critic": {"loss": "vf_loss"}}
_OF_ROUTERS = (
    "load_balance_loss", "router_z_loss", "expert_load_max", "expert_load_entropy", "router_replayed", "router_drift"
)  # fmt: skip
_ENGINE_METRICS = ("loss", "grad_norm", "lr", *_OF_ROUTERS)


class UpdateRefused(Exception):  # noqa: N818  # an ordinary turn of events: the batch could not be claimed
    """The prepared batch must not be used."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of training on one batch; the same on every rank.

    Attributes:
        metrics: of engines and algorithm, averaged over the optimizer steps.
        skipped: optimizer steps without a finite gradient.
        all_skipped: by role that had something to train, whether all its steps were such.
        mismatch: of generators and policy at the version that was trained; None where the policy was not computed.
        speed: time, arithmetic and memory by role, see `StepMeter`; the times are this process's.
        tokens: values of the batch's tokens.
    """

    metrics: dict[str, float]
    skipped: int
    all_skipped: dict[str, bool] = field(default_factory=dict)
    mismatch: Mismatch | None = None
    speed: dict[str, float] = field(default_factory=dict)
    tokens: BatchTokens | None = None

    @property
    def policy_changed(self) -> bool:
        """True if the policy has other weights than before: one of its steps was not skipped."""
        return not self.all_skipped.get(ACTOR, True)


@dataclass(frozen=True, slots=True)
class WorkerRules:
    """Sizes of the training, and the records of it.

    Attributes:
        epochs: passes over a batch.
        token_budget: tokens per micro-batch.
        seed: of the run.
        profiler: records chosen steps.
        base_roles: those whose model is the actor's without its adapter.
        form: see `compatibility.trained_form`.
    """

    epochs: int
    token_budget: int
    seed: int
    profiler: StepProfiler
    base_roles: frozenset[str] = frozenset()
    form: Mapping[str, Any] = field(default_factory=lambda: trained_form(EngineSection()))


class Worker:
    """Trains with the engines of this rank.

    Args:
        engines: by role; `actor` is the policy.
        algorithm: stages and losses.
        payloads: this rank's trajectories.
        store: of the checkpoints.
        rules: of the training.
        experts: that generators have recorded of them; None: they are not replayed.
        elsewhere: roles whose models other processes hold.
        images: of this rank's prompts; None: they are text alone.

    Attributes:
        memory: of the engines, for turns on shared devices.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        algorithm: Algorithm,
        payloads: TrajectorySource,
        store: CheckpointStore,
        rules: WorkerRules,
        *,
        experts: ExpertSource | None = None,
        elsewhere: Mapping[str, RoleElsewhere] = MappingProxyType({}),
        images: PromptImageSource | None = None,
    ) -> None:
        self._experts = experts
        self._engines = dict(engines)
        self._actor = engines[ACTOR]
        self._algorithm = algorithm
        self._payloads = payloads
        self._images = images
        self._store = store
        self._rules = rules
        self._needs = algorithm.needs
        self._kinds = {ACTOR: "language_model"} | {role.name: role.kind for role in self._needs.roles}
        self._prepared: tuple[TrainPlan, dict[int, TrainSequence]] | None = None
        self._elsewhere = elsewhere
        self.memory = RolesMemory(engines)

    @property
    def packing(self) -> Packing:
        """The loosest packing of all models, since all get the same micro-batches."""
        taken = {engine.packing for engine in self._engines.values()}
        return max(taken, key=list(Packing).index)

    def sequence_cost(
        self, tokens: NDArray[np.int64], context: NDArray[np.int64], again: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Operations of all models for sequences, see `ModelCost.sequence_flops`; backward passes too."""
        total = np.zeros(len(tokens))
        times = [(engine, 3 if engine.trained else 1) for engine in self._engines.values()]
        for engine, passes in (*times, *((self._actor, 1) for _ in self._rules.base_roles)):
            total += passes * engine.cost.sequence_flops(tokens, context, again)
        return total

    @property
    def dp_sizes(self) -> set[int]:
        """Numbers of data-parallel ranks of the models: a plan divides a batch for each."""
        return {engine.layout.dp_size for engine in self._engines.values()}

    def prepare(self, plan: TrainPlan) -> Unusable:
        """Gets this rank's share; a plan that was not trained is replaced.

        Returns:
            Groups that cannot be trained, and why, whichever rank has found it. Without any, the batch is prepared.

        Raises:
            UnreachableError: the buffer stayed away, from this rank or another.
            StoreError: likewise, Redis.
        """
        self._prepared = None
        sizes = [engine.vocab_size for engine in self._engines.values()]
        vocabulary = min([*sizes, *(role.vocab_size for role in self._elsewhere.values())])
        sequences, unusable = gather_sequences(
            self._engines.values(), plan, self._payloads, vocabulary, self._experts, self._images
        )
        if not unusable:
            self._prepared = plan, sequences
        return unusable

    def train(self, before_first_update: Callable[[], None]) -> TrainResult:
        """The batch stage, then all optimizer steps on the prepared batch.

        Args:
            before_first_update: called exactly once, when everything is ready for the first update of any role; where
                it raises `UpdateRefused`, nothing has changed.

        Raises:
            UpdateRefused: passed on.
            ConfigError: the algorithm breaks a rule of its interface.
        """
        if self._prepared is None:
            raise RuntimeError("no batch is prepared")
        (plan, sequences), self._prepared = self._prepared, None
        # The step makes the next version.
        with self._rules.profiler.step(plan.version + 1):
            return self._train(plan, sequences, before_first_update)

    def _train(
        self, plan: TrainPlan, sequences: dict[int, TrainSequence], before_first_update: Callable[[], None]
    ) -> TrainResult:
        before_update = _CallOnce(before_first_update)
        before = copy.deepcopy(self._algorithm.state())
        try:
            batch = RolloutBatch(
                plan,
                sequences,
                self._engines | dict.fromkeys(self._rules.base_roles, self._actor),
                self._kinds,
                before_update,
                token_budget=self._rules.token_budget,
                seed=self._rules.seed,
                base_roles=self._rules.base_roles,
                elsewhere=self._elsewhere,
                begins_at=self._algorithm.begins_at,
            )
            self._algorithm.batch_stage(batch)
            if (state := agree_on_state(self._actor, self._algorithm.state())) is not None:
                self._algorithm.restore(state)
            self._update(batch)
            # An algorithm may train nothing on a batch; it is claimed like any other.
            before_update()
        except UpdateRefused:
            self._algorithm.restore(before)
            raise
        results = [result for role in batch.results.values() for result in role]
        metrics: dict[str, float] = {}
        for role, done in batch.results.items():
            metrics |= _with_role(role, _mean([result.metrics for result in done]))
        due = {role: [result for result in done if result.metrics] for role, done in batch.results.items()}
        all_skipped = {role: all(result.skipped for result in steps) for role, steps in due.items() if steps}
        if batch.mismatch is not None:
            metrics |= batch.mismatch.metrics()
        return TrainResult(
            metrics | batch.metrics,
            sum(result.skipped for result in results),
            all_skipped,
            batch.mismatch,
            speed=batch.meter.metrics(),
            tokens=batch.gather_tokens(),
        )

    def log_probs(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The policy's log-probs of a sequence at temperature 1, as they are computed for training; collective.

        Args:
            token_ids: int32 [T], the same on every rank; at least 2.

        Returns:
            float32 [T - 1], of each token but the first, after those before it.
        """
        count = len(token_ids) - 1
        ones, zeros = np.ones(count, dtype=np.uint8), np.zeros(count, dtype=np.float32)
        sequence = TrainSequence(token_ids[:1], token_ids[1:], ones, zeros, temperature=1.0)
        # Every data-parallel rank computes it, so that all take part.
        outputs = self._actor.infer([pack([sequence], device=self._actor.device)])
        own = outputs[0].policy()[0] if outputs else torch.zeros(0, device=self._actor.device)
        found: NDArray[np.float32] = self._actor.gather(own)[0].float().cpu().numpy()
        return found

    def check_folder(self) -> None:
        """Refuses a folder of checkpoints that some rank cannot write or see.

        Raises:
            ConfigError: names the folder and a rank.
        """
        self._store.check(self._actor)

    def begin_checkpoint(self, version: PolicyVersion, extra: dict[str, object]) -> Future[Path]:
        """Has a checkpoint of all that is trained written, as it is now; see `CheckpointStore.begin`."""
        algorithm = {"name": algorithm_name(self._algorithm), "state": self._algorithm.state()}
        extra = extra | {"algorithm": algorithm, **self._rules.form}
        return self._store.begin(self._engines, version, extra, self._elsewhere)

    def load(self, folder: Path) -> dict[str, object]:
        """Goes back to a checkpoint; returns the extra data stored with it.

        Raises:
            ConfigError: its optimizers, its adapter or its frozen parts are others.
            DataError: it is not one of this model, or of this algorithm and its roles.
        """
        check_form(folder, self._rules.form)
        extra = load_checkpoint(self._engines, folder, self._elsewhere)
        self._algorithm.restore(algorithm_state(folder, extra, self._algorithm))
        return extra

    def attach_roles(self, incarnation: int) -> None:
        """Has the roles elsewhere serve this learner, with the models of the checkpoint that was loaded.

        Args:
            incarnation: of this learner, known on rank 0; its number does not matter on the others.

        Raises:
            RoleLostError: one stays away.
            ConfigError: one has other settings.
        """
        for role in self._elsewhere.values():
            role.attach(incarnation)

    def close(self) -> None:
        self._store.close()
        for engine in self._engines.values():
            engine.close()

    def _update(self, batch: RolloutBatch) -> None:
        losses = self._algorithm.losses(batch.version)
        silent = self._algorithm.silent_without_advantage
        steps = {role: batch.steps(role, skip_zero_advantage=silent and role == ACTOR) for role in losses}
        for _ in range(self._rules.epochs):
            for minibatch in range(batch.minibatches):
                for role, loss in losses.items():
                    step = steps[role][minibatch]
                    if role == ACTOR and self._needs.selection:
                        batch.select(self._algorithm, minibatch, step)
                    batch.update(role, loss, step)


class _CallOnce:
    """Calls a function the first time, and does nothing later."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask: Callable[[], None] | None = ask

    def __call__(self) -> None:
        ask, self._ask = self._ask, None
        if ask is not None:
            ask()


def _with_role(role: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The engine's metrics under the role's name; those of the algorithm have their own."""
    names = _METRIC_NAMES.get(role, {})
    return {
        f"{role}/{names.get(name, name)}" if name in _ENGINE_METRICS else name: value for name, value in metrics.items()
    }


def _mean(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean per name over the parts that have it."""
    if len(parts) == 1:
        return dict(parts[0])
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}

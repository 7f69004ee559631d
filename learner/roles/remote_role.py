"""A role elsewhere as the learner's ranks see it.

Invariants: every method is collective over the ranks. The leading one alone calls the role's processes, and the others
get what it got, also its failure. While it waits they hear from it, so that no collective of theirs times out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import torch
from torch import Tensor

from rollmesh.learner.algorithms.interface import Algorithm, Loss
from rollmesh.learner.algorithms.types import GlobalCounts, ModelOutput, ModelRole, Rollouts
from rollmesh.learner.distributed.batch_sequences import BatchSequences
from rollmesh.learner.distributed.rank_batch import OptimizerStep
from rollmesh.learner.distributed.role_batch import RoleBatch
from rollmesh.learner.engines.interface import StepResult
from rollmesh.learner.engines.schedule import RunStep
from rollmesh.learner.engines.world import World
from rollmesh.learner.roles.batch_tensors import rollout_tensors, sequence_tensors
from rollmesh.learner.roles.client import RoleClient
from rollmesh.mesh.errors import ConfigError, DataError, RoleLostError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge

T = TypeVar("T")
_KEEP_ALIVE_S = 20.0
_WAITING, _DONE, _FAILED = b"waiting", b"done", b"failed:"


class RemoteRole:
    """A role whose model other processes hold; implements `RoleElsewhere`.

    Args:
        role: of the algorithm.
        algorithm: of the run.
        world: the learner's processes.

    Attributes:
        role: as given.
    """

    def __init__(self, role: ModelRole, algorithm: Algorithm, world: World) -> None:
        self.role = role
        self._algorithm = algorithm
        self._world = world
        self._bridge: AsyncBridge | None = None
        self._client: RoleClient | None = None
        self._checkpoint = ""
        self._vocab_size = 0
        # Well within the deadline of a collective, in which the others wait.
        self._keep_alive_s = min(_KEEP_ALIVE_S, world.timeout.total_seconds() / 3)

    @property
    def trained(self) -> bool:
        """It has an optimizer, and a part in checkpoints."""
        return self.role.trained

    def connect(self, bridge: AsyncBridge, client: RoleClient) -> None:
        """Gives the leading process its client."""
        self._bridge, self._client = bridge, client

    @property
    def engine(self) -> str:
        """Engine and division, in words; known in the leading process once the role is attached."""
        return "" if self._client is None else self._client.description.engine

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._vocab_size

    def attach(self, incarnation: int) -> None:
        """See `RoleElsewhere`."""
        checkpoint = self._checkpoint if self.role.trained else ""
        self.lead(lambda client: client.attach(incarnation, checkpoint))
        size = 0 if self._client is None else self._client.description.vocab_size
        self._vocab_size = self._world.max_int(size)

    def open_batch(self, sequences: BatchSequences | None, minibatches: int) -> RoleBatch:
        """See `RoleElsewhere`."""
        return RemoteBatch(self, sequences, minibatches)

    def begin_checkpoint(self, folder: Path, extra: dict[str, object]) -> Future[None]:
        """See `Engine.begin_checkpoint`."""
        session = self._client.session if self._client is not None else ""
        self.lead(lambda client: client.begin_checkpoint(str(folder.resolve()), extra))
        if self._client is None or self._bridge is None:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self._bridge.submit(_written(self._client, session))

    def load_checkpoint(self, folder: Path) -> dict[str, object]:
        """Remembers the folder: it is loaded when the role is attached, by the learner that has the run."""
        self._checkpoint = str(folder.resolve())
        return {}

    def lead(self, call: Callable[[RoleClient], Coroutine[Any, Any, T]]) -> T | None:
        """Has the leading process make a call, and all others wait for its end; collective.

        Returns:
            The call's result in the leading process; None in the others.

        Raises:
            RollmeshError: in the leading process; the others raise a RoleLostError with its text.
        """
        future: Future[T] | None = None
        if self._world.process == 0:
            future = self._submit(call)
        while True:
            said = self._world.gather_bytes(_state(future, self._keep_alive_s))[0]
            if said == _WAITING:
                continue
            if future is not None:
                return future.result()
            if said == _DONE:
                return None
            raise RoleLostError(said.removeprefix(_FAILED).decode())

    @property
    def world(self) -> World:
        """The learner's processes."""
        return self._world

    def loss_name(self, loss: Loss) -> str:
        """The name by which the role's processes find a loss.

        Raises:
            ConfigError: it is no method of the algorithm.
        """
        name = getattr(loss, "__name__", "")
        if getattr(loss, "__self__", None) is not self._algorithm or name.startswith("_"):
            raise ConfigError(
                f"the loss of role {self.role.name} is no public method of the algorithm, and its processes cannot "
                "find it",
                hint=f"make it a method, or set learner.roles.{self.role.name}.at: learner",
            )
        return name

    def algorithm_state(self) -> str:
        """The state of the algorithm as JSON."""
        return json.dumps(self._algorithm.state())

    def _submit(self, call: Callable[[RoleClient], Coroutine[Any, Any, T]]) -> Future[T]:
        if self._client is None or self._bridge is None:
            raise RuntimeError(f"role {self.role.name} is not attached")
        return self._bridge.submit(call(self._client))


class RemoteBatch(RoleBatch):
    """The work of a role elsewhere on a batch.

    Args:
        role: elsewhere.
        sequences: of the batch, in the leading process.
        minibatches: of the batch.
    """

    def __init__(self, role: RemoteRole, sequences: BatchSequences | None, minibatches: int) -> None:
        self._role = role
        self._sequences = sequences
        self._minibatches = minibatches
        self._sent = False
        self._skip_zero_advantage = False

    def infer(self, rollouts: Rollouts, minibatches: Sequence[int], *, sum_pi_squared: bool = False) -> ModelOutput:
        if not self._sent:
            self._put(None)
        found = self._role.lead(lambda client: client.infer(minibatches, sum_pi_squared=sum_pi_squared))
        tokens, device = rollouts.num_tokens, rollouts.behaviour_log_probs.device

        def values(name: str) -> Tensor:
            own = torch.zeros(tokens) if found is None else torch.from_numpy(found[name])
            return self._role.world.broadcast(own.to(device))

        if self._role.role.kind == "value_model":
            return ModelOutput(values=values("values"))
        return ModelOutput(
            log_probs=values("log_probs"),
            entropy=values("entropy"),
            sum_pi_squared=values("sum_pi_squared") if sum_pi_squared else None,
        )

    def steps(self, rollouts: Rollouts, *, skip_zero_advantage: bool) -> list[OptimizerStep]:
        self._put(rollouts)
        self._skip_zero_advantage = skip_zero_advantage
        # The role's processes count for themselves.
        return [OptimizerStep(minibatch, [], [], GlobalCounts(0, 0)) for minibatch in range(self._minibatches)]

    def accumulate(self, step: OptimizerStep, loss: Loss) -> None:
        name, state = self._role.loss_name(loss), self._role.algorithm_state()
        self._role.lead(
            lambda client: client.accumulate(
                name, step.minibatch, skip_zero_advantage=self._skip_zero_advantage, state=state
            )
        )

    def apply(self, at: RunStep) -> StepResult:
        done = self._role.lead(lambda client: client.apply(at))
        own = b"" if done is None else msgpack.packb([done.metrics, done.skipped])
        return StepResult(*msgpack.unpackb(self._role.world.gather_bytes(own)[0]))

    def discard(self) -> None:
        self._role.lead(RoleClient.discard)

    def _put(self, rollouts: Rollouts | None) -> None:
        """Gives the batch to the role, and the rollouts as they are now."""
        tensors = {} if self._sequences is None else sequence_tensors(self._sequences)
        if rollouts is not None and self._role.world.process == 0:
            tensors |= rollout_tensors(rollouts)
        self._role.lead(lambda client: client.put(tensors))
        self._sent = True


def _state(future: Future[Any] | None, within_s: float) -> bytes:
    """The state of the leading process's call, at its end or after some seconds; nothing in the others."""
    if future is None:
        return b""
    if not wait([future], within_s).done:
        return _WAITING
    error = future.exception()
    return _DONE if error is None else _FAILED + str(error).encode()


async def _written(client: RoleClient, session: str) -> None:
    """Waits for the role's part of a checkpoint.

    Raises:
        OSError: a disk refuses it.
    """
    try:
        await client.await_checkpoint(session)
    except DataError as error:
        raise OSError(error.message) from error

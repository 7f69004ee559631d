"""The programming model: an algorithm is a small class with a group stage, a batch stage and losses.

The learner calls, for every batch::

    reason = algorithm.group_stage(group)        # once per complete group: None keeps it, a reason drops and refills
    algorithm.batch_stage(batch)                 # once per batch, over all ranks, before its first optimizer step
    for every optimizer step:
        selected = algorithm.select(view)        # where `needs.selection`: over the whole minibatch
        for role, loss in algorithm.losses().items():
            output = loss(model_output, tokens, counts)  # per micro-batch, inside forward/backward

Invariants: the batch stage runs on every rank with the same data; where ranks come to different results, rank 0's is
trained. Changes that the stage makes to the algorithm itself are in `state`, and undone where the batch is refused.
Nothing here knows of RPC, storage or engines; torch is the only dependency.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from rollmesh.learner.algorithms.settings import Settings
from rollmesh.learner.algorithms.types import (
    GlobalCounts,
    Group,
    LossOutput,
    ModelOutput,
    Needs,
    Rollouts,
    StepView,
    TokenBatch,
)
from rollmesh.learner.algorithms.types import UpdatePlan as UpdatePlan

Loss = Callable[[ModelOutput, TokenBatch, GlobalCounts], LossOutput]
"""(model output with gradient, tokens, global counts) -> this micro-batch's share."""


class Batch(Protocol):
    """A claimed batch over all ranks, and the models that can look at it.

    Every method is collective: all ranks call the same ones in the same order.
    """

    @property
    def rollouts(self) -> Rollouts:
        """The data; the batch stage fills its optional fields."""
        ...

    @property
    def version(self) -> int:
        """Policy version that is trained: the number of batches trained before this one."""
        ...

    @property
    def generator(self) -> torch.Generator:
        """Random numbers of this batch, the same on every rank; on the CPU, whatever device trains."""
        ...

    def infer(self, role: str, *, sum_pi_squared: bool = False) -> ModelOutput:
        """Runs a role's model, as it is now, on every trained token of the batch, without gradient.

        Args:
            role: `actor`, or one of the algorithm's roles.
            sum_pi_squared: give that field too.
        """
        ...

    def train(self, role: str, loss: Loss) -> None:
        """Trains a role other than the actor on this batch now, one optimizer step per minibatch.

        Waits for the batch's claim where it is the first update; reports the role's metrics. `tokens` are made of
        `rollouts` as they are now.
        """
        ...

    def report(self, metrics: Mapping[str, float]) -> None:
        """Adds to the step's metrics."""
        ...


class Algorithm(ABC):
    """Base of all algorithms.

    Attributes:
        settings_type: dataclass of the settings, filled from the `algorithm` section.
        defaults: settings that differ from those of `settings_type`, in the form of the configuration: a preset.
    """

    settings_type: ClassVar[type[Settings]] = Settings
    defaults: ClassVar[Mapping[str, Any]] = {}
    settings: Settings

    def __init__(self, settings: Settings, plan: UpdatePlan) -> None:
        """Keeps settings and plan.

        Args:
            settings: an instance of `settings_type`.
            plan: what the run does with each batch.

        Raises:
            SettingsError: where the two contradict one another.
        """
        self.settings = settings
        self.plan = plan

    @property
    def needs(self) -> Needs:
        """Needs that must be met; default: the actor alone."""
        return Needs()

    @property
    def silent_without_advantage(self) -> bool:
        """True where a token with advantage 0 adds nothing to loss or gradient, so that it need not be computed."""
        return False

    def notices(self) -> list[str]:
        """Notices about the settings in this run, by their keys, shown at start. Default: none."""
        return []

    def expected_cost(self, group: Group) -> float:  # noqa: ARG002 - most algorithms train all of every group
        """Share of a group's full cost (forward and backward) that it will have, as far as its metadata show.

        Ranks are balanced by it before anything of the batch is computed; the trained tokens are chosen afterwards.
        """
        return 1.0

    def group_stage(self, group: Group) -> str | None:  # noqa: ARG002 - most algorithms keep every group
        """Decides on a group: None trains it; a reason drops it, counts it as filtered, and another takes its place."""
        return None

    @abstractmethod
    def batch_stage(self, batch: Batch) -> None:
        """Fills `batch.rollouts.advantages`, and whatever else the losses need."""

    def select(self, view: StepView) -> Tensor:
        """Values per token [R] that appear as `TokenBatch.selected` in this optimizer step (`needs.selection`)."""
        raise NotImplementedError

    def losses(self, version: int) -> Mapping[str, Loss]:  # noqa: ARG002 - only warm-ups look at it
        """The losses of an optimizer step by role, in the order of their updates.

        Args:
            version: policy version that is trained.
        """
        return {"actor": self.loss}

    def begins_at(self, role: str) -> int:  # noqa: ARG002 - only warm-ups look at it
        """The first version that trains a role: its warm-up and its schedule begin there."""
        return 0

    @abstractmethod
    def loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        """The actor's loss: a micro-batch's share.

        Args:
            output: of the current policy, with gradient (the entropy's only where `needs.entropy_gradient`).
            tokens: the same tokens' data.
            counts: sizes of the whole optimizer batch.
        """

    def state(self) -> dict[str, Any]:
        """State that the algorithm itself has learned (coefficients, running statistics), as JSON; default: nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most algorithms have no state
        """Inverse of `state`."""

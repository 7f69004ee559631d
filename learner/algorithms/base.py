"""The programming model: an algorithm is a small class that says what happens to a group, to a batch and in the loss.

The learner calls, for every batch it claims::

    advantages = algorithm.group_stage(group)                    # once per complete group
    algorithm.batch_stage(batch)                                 # once per batch, before its first optimizer step
    output = algorithm.loss(log_probs, entropy, tokens, counts)  # per micro-batch, inside forward/backward

Nothing here knows of RPC, storage or engines; torch is the only dependency.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from learner.algorithms.settings import Settings
from learner.algorithms.types import GlobalCounts, Group, LossOutput, MemberAdvantages, TokenBatch, UpdatePlan


class Batch(Protocol):
    """A claimed batch, packed into micro-batches, and the models that can look at it."""

    @property
    def tokens(self) -> Sequence[TokenBatch]:
        """The trained tokens of every micro-batch; their optional fields may be set."""
        ...

    def log_probs(self, role: str) -> list[Tensor]:
        """Log-probs of the trained tokens under a role's policy as it is now.

        Args:
            role: one of the algorithm's `roles`.

        Returns:
            float32 [R] per micro-batch, without gradient.
        """
        ...


class Algorithm(ABC):
    """Base of all algorithms.

    Class attributes:
        settings_type: dataclass of the settings, filled from `algorithm.params`.
        roles: the models it needs; `actor` is always there.
        silent_without_advantage: a token whose advantage is 0 adds nothing to loss or gradient, so that sequences
            without any other need not be computed.
    """

    settings_type: ClassVar[type[Settings]] = Settings
    roles: ClassVar[tuple[str, ...]] = ("actor",)
    silent_without_advantage: bool = False
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

    @abstractmethod
    def group_stage(self, group: Group) -> MemberAdvantages | str:
        """Advantages of a complete group's members (zeros for those not scored), or the reason to drop the group.

        A dropped group is counted as filtered under that reason.
        """

    def batch_stage(self, batch: Batch) -> None:  # noqa: B027 - most algorithms need nothing here
        """Adds to the tokens what the loss needs (proximal or reference log-probs). Default: nothing."""

    @abstractmethod
    def loss(self, log_probs: Tensor, entropy: Tensor, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        """A micro-batch's share of the loss.

        Args:
            log_probs: float32 [R], current policy, with gradient.
            entropy: float32 [R], entropy of the current policy at each trained token (nats), without gradient.
            tokens: the same tokens' data.
            counts: sizes of the whole optimizer batch.
        """

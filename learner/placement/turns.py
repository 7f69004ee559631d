"""The turns of a learner on its devices, as the training loop sees them."""

from __future__ import annotations

from typing import Protocol


class Turns(Protocol):
    """The learner's turns; all methods belong to the training thread."""

    def settle(self, version: int) -> None:
        """Ends a turn in which no further batch can be trained at once.

        Args:
            version: the next to be trained.
        """
        ...

    def take(self, version: int) -> bool:
        """Has the devices for a batch that is held; False where that has to be tried again, after another gathering.

        Args:
            version: that the batch will train.
        """
        ...

    def require(self, why: str, *, last: bool = False) -> None:
        """Has the devices, whatever else: for a checkpoint.

        Args:
            why: what they are needed for.
            last: the run ends after it, in an error: generators that do not answer are not waited for again and again.

        Raises:
            SwapError: they could not be taken.
        """
        ...

    def give(self) -> None:
        """Ends the turn, if there is one."""
        ...

    def batch_trained(self) -> None:
        """Records a batch of the present turn."""
        ...

    def close(self) -> None:
        """Ends what runs in the background; the devices stay with whom they are."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the swaps, `placement/...`; none without any."""
        ...


class OwnDevices:
    """The turns of a learner with devices of its own: one that never ends."""

    def settle(self, version: int) -> None:
        """Nothing ends."""

    def take(self, version: int) -> bool:  # noqa: ARG002 # of the protocol
        """They are there."""
        return True

    def require(self, why: str, *, last: bool = False) -> None:
        """They are there."""

    def give(self) -> None:
        """Nothing ends."""

    def batch_trained(self) -> None:
        """Nothing is counted."""

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}

    def close(self) -> None:
        """Nothing is open."""

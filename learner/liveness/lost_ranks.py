"""Decides which rank has left the others waiting, and why. Pure.

Invariants:
- clocks of different machines are never compared: a rank is silent for as long as the watcher sees the same beat;
- an observation that comes late counts for `MAX_OBSERVATION_S` at most, as the watcher itself may have been stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rollmesh.learner.liveness.stall_detector import MAX_OBSERVATION_S
from rollmesh.mesh.runtime.rank_board import RankState


class SilenceTimer:
    """Seconds for which ranks have not been heard, from observations in the order of time.

    Args:
        ranks: that are watched.
    """

    def __init__(self, ranks: int) -> None:
        self._beats = [-1] * ranks
        self._silent_s = [0.0] * ranks
        self._last_s: list[float | None] = [None] * ranks

    def observe(self, now_s: float, states: Mapping[int, RankState]) -> None:
        """Counts for the ranks that were looked at.

        Args:
            now_s: of a monotonic clock.
            states: of those ranks, as far as they have written any.
        """
        for rank, state in states.items():
            last_s, self._last_s[rank] = self._last_s[rank], now_s
            if state.beat != self._beats[rank]:
                self._beats[rank], self._silent_s[rank] = state.beat, 0.0
            elif last_s is not None:
                self._silent_s[rank] += min(max(0.0, now_s - last_s), MAX_OBSERVATION_S)

    def of(self, rank: int) -> float:
        """Seconds of one rank; 0 where it was never heard."""
        return self._silent_s[rank]


def describe_silent(states: Mapping[int, RankState], silence: SilenceTimer, bound_s: float) -> str:
    """The ranks that have been silent for longer than a bound, in words; empty without any."""
    return "; ".join(_describe(rank, state, silence) for rank, state in states.items() if silence.of(rank) > bound_s)


def describe_cause(
    states: Mapping[int, RankState], silence: SilenceTimer, bound_s: float, ranks: Collection[int]
) -> str:
    """The cause of a collective that has failed, in words.

    Errors of a rank's own come first. Then come ranks that are silent, those that have not come, and those that do not
    wait for others.

    Args:
        states: of all ranks.
        silence: of the same.
        bound_s: a rank is silent after that.
        ranks: that there should be.

    Returns:
        Empty where every rank says that it has waited for others.
    """
    own = [
        f"{state.describe(rank)} has failed: {state.failed}" for rank, state in states.items() if _failed_itself(state)
    ]
    if own:
        return "; ".join(own)
    if silent := describe_silent(states, silence, bound_s):
        return silent
    if missing := [str(rank) for rank in ranks if rank not in states]:
        return f"rank {', '.join(missing)} has not been heard at all: it was not started, or does not reach the others"
    return "; ".join(
        f"{state.describe(rank)} runs, and does not take part in the others' exchange"
        for rank, state in states.items()
        if not state.failed
    )


def all_explained(states: Mapping[int, RankState], silence: SilenceTimer, bound_s: float, ranks: int) -> bool:
    """True where each of the given number of ranks has said how its work ended, or is silent."""
    return len(states) == ranks and all(state.failed or silence.of(rank) > bound_s for rank, state in states.items())


def _failed_itself(state: RankState) -> bool:
    return bool(state.failed) and not state.echo


def _describe(rank: int, state: RankState, silence: SilenceTimer) -> str:
    return (
        f"{state.describe(rank)} has not been heard for {silence.of(rank):.0f} s: it was killed, is stopped, "
        "or its machine is cut off"
    )

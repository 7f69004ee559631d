"""The notice that rewards are slow, with the known causes and the key that changes it.

A slow reward loses nothing: generators stop where too many responses wait, and the learner waits for them. A service
that does not answer, and a function that does not return, lose the reward of responses: then the notice reports the
loss.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers import classifier, judge, process
from rollmesh.mesh.config.scorers.code import NAMES as CODE
from rollmesh.mesh.runtime.threads import reward_workers
from rollmesh.protos import membership_pb2

_MODELS = (classifier.NAME, process.NAME)
_LEAST_S = 10.0
# Rewards must be quick for this long before the schedule begins from the start.
_FORGOTTEN_S = 300.0


class SlowRewardsNotice:
    """Schedules the notice: when a response has waited long, and when one has waited twice as long as last reported.

    After a time without slow rewards the schedule begins from the start.

    Args:
        now: seconds of the clock.
    """

    def __init__(self, now: float) -> None:
        self._after = _LEAST_S
        self._slow_at = now

    def due(self, waited_s: float, now: float) -> bool:
        """True where the notice is due.

        Args:
            waited_s: seconds for which the first response without a reward has waited.
            now: seconds of the clock.
        """
        if waited_s >= _LEAST_S:
            self._slow_at = now
        elif now - self._slow_at >= _FORGOTTEN_S:
            self._after = _LEAST_S
        if waited_s < self._after:
            return False
        self._after = 2 * waited_s
        return True


def reward_wait_s(snapshot: Snapshot) -> float:
    """Seconds for which the first response without a reward has waited."""
    return max((member.gauges.get("reward_wait_seconds", 0.0) for member in snapshot.generators()), default=0.0)


def slow_rewards_text(snapshot: Snapshot, config: Config) -> str:
    """The notice: how many responses wait, why, and what becomes of them.

    Args:
        snapshot: of now.
        config: the configuration.
    """
    waiting, waited_s = snapshot.sum_of("members_unscored"), reward_wait_s(snapshot)
    if silent := _reason(snapshot.generators(), membership_pb2.WAIT_CAUSE_NO_REWARD_SERVICE):
        return (
            f"{waiting:.0f} responses wait for rewards, the first of them for {waited_s:.0f} s: {silent}; a response "
            f"fails after {config.rollout.reward_wait_s:g} s (rollout.reward_wait_s)"
        )
    services = [member for member in snapshot.members if member.role == membership_pb2.ROLE_REWARD]
    hanging = _reason([*services, *snapshot.generators()], membership_pb2.WAIT_CAUSE_REWARD_OVERDUE)
    why = hanging or _reason(services)
    text = f"rewards are slow: {waiting:.0f} responses wait for theirs, the first of them for"
    text += f" {waited_s:.0f} s{f' ({why})' if why else ''}; "
    if hanging:
        return f"{text}{_more_workers(config.reward, 'if the function is slow and does not hang, more')}"
    text += "nothing is lost; the run waits. "
    if config.reward.endpoints:
        return f"{text}More services in reward.endpoints score more at a time"
    return text + " ".join(_remedies(config.reward, why))


def _remedies(reward: RewardSection, why: str) -> list[str]:
    """The keys that change it: those of the scorer that says why, or of all that may be meant."""
    remedies: dict[tuple[str, ...], str] = {
        (judge.NAME,): "A judge answers as fast as its limits allow: reward.judge.requests_per_minute, "
        "tokens_per_minute, concurrency.",
        CODE: "As many programs run at a time as reward.isolation.concurrency says; "
        "services on other machines run more.",
        **{
            (name,): f"The model of `{name}` is quicker on a device of its own: reward.{name}.device."
            for name in _MODELS
        },
    }
    speaker = why.partition(":")[0]
    if own := next((remedy for names, remedy in remedies.items() if speaker in names), ""):
        return [own]
    if "reward.workers" in why:
        return [_more_workers(reward, "More")]
    used = [remedy for names, remedy in remedies.items() if set(names).intersection(reward.uses)]
    return [*used, _more_workers(reward, "For other functions, more" if used else "More")]


def _more_workers(reward: RewardSection, more: str) -> str:
    return f"{more} workers score more at a time: --reward.workers={2 * max(reward_workers(reward.workers))}"


def _reason(members: Iterable[membership_pb2.Member], cause: membership_pb2.WaitCause | None = None) -> str:
    """The first reason, or the first of a cause, without what the generator does meanwhile; empty without any."""
    waits = (member for member in members if cause in (None, member.wait_cause))
    return next((wait.waiting_reason.removeprefix("waits for rewards: ") for wait in waits if wait.waiting_reason), "")

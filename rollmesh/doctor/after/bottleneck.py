"""The side for which the others wait, and the key to change, with its value.

A proposed number follows from the shares. If one side waits for a share w of its time, the other one is needed
1 / (1 - w) times as fast. It is a first step to try, not an optimum, and at most four times the present value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rollmesh.doctor.after.time_use import CHECKPOINT, CLAIM, PUBLISH, WAIT, TimeUse
from rollmesh.doctor.findings import Finding, note, ok, warning
from rollmesh.mesh.config.models import Config

CHECK = "time"
# Share of time from which a wait is worth a change, and how much longer than the other side's it is then.
_LONG, _MUCH_MORE = 0.2, 2.0
_BUSY = 0.8
_MOST = 4.0
_PUBLISHING, _SAVING, _SWAPPING = 0.15, 0.1, 0.3
# Finished responses without reward for each one that is decoded: rewards are late.
_LATE = 0.5


def judge_time(use: TimeUse | None, config: Config, swap_share: float | None = None) -> Iterator[Finding]:
    """Findings about the time of a run.

    Args:
        use: shares of time; None: too short a run.
        config: of the run.
        swap_share: of the time of shared devices; None without them.
    """
    if use is None:
        yield note(CHECK, "not known: fewer than two steps were trained without a restart")
        return
    waits, idle = use.learner.get(WAIT, 0.0), use.idle or 0.0
    numbers = _numbers(use)
    shares = ", ".join(f"{phase} {share:.0%}" for phase, share in use.learner.items() if share >= 0.01)
    at_gate = "" if use.idle is None else f"; generators idle {use.idle:.0%}"
    busy = "" if use.reward_busy is None else f"; reward workers busy {use.reward_busy:.0%}"
    where = f"learner: {shares or 'not known'}{at_gate}{busy}"
    if config.placement.learner_takes_turns:
        yield note(CHECK, f"{where}; devices are shared, so each side waits in the other's turn", "", **numbers)
    elif waits >= _LONG and _rewards_are_late(use):
        yield _more_rewards(use, config, where, waits)
    elif max(waits, idle) < _LONG:
        yield ok(CHECK, where, **numbers)
    elif waits >= _MUCH_MORE * idle:
        yield _more_generation(config, where, waits, use)
    elif idle >= _MUCH_MORE * waits:
        yield _more_training(config, where, idle, use)
    else:
        staleness = config.buffer.max_staleness
        yield warning(
            CHECK,
            f"{where}: both sides wait for each other",
            f"buffer.max_staleness={staleness + 1} (now {staleness}) lets generators work ahead; else the groups of a "
            "batch end at very different times: fewer learner.batch.groups, or buffer.order=fifo",
            **numbers,
        )
    yield from _judge_phases(use, config)
    if swap_share is not None and swap_share >= _SWAPPING:
        batches = config.placement.batches_per_turn
        yield warning(
            CHECK,
            f"swaps of shared devices take {swap_share:.0%} of the time",
            "more batches in a turn: placement.batches_per_turn up to buffer.max_staleness + 1 "
            f"({config.buffer.max_staleness + 1}; now {batches or 'derived'}), or placement=split",
            swap_share=swap_share,
        )


def _rewards_are_late(use: TimeUse) -> bool:
    busy = use.reward_busy is not None and use.reward_busy >= _BUSY
    waiting = use.unscored is not None and use.unscored > _LATE * max(use.active or 0.0, 1.0)
    return busy or waiting


def _more_rewards(use: TimeUse, config: Config, where: str, waits: float) -> Finding:
    numbers = _numbers(use)
    if use.reward_busy is not None and use.reward_busy >= _BUSY and use.reward_workers:
        wanted = _scaled(use.reward_workers, waits)
        return warning(
            CHECK,
            f"{where}: rewards are the bottleneck, {use.reward_workers} worker(s) were busy {use.reward_busy:.0%} of "
            "their time",
            f"reward.workers={wanted} (now {config.reward.workers or 'derived'}, {use.reward_workers} were started); "
            "on a machine without free cores a second `rollmesh reward cfg.yaml --mesh HOST:PORT` elsewhere",
            reward_workers_wanted=wanted,
            **numbers,
        )
    if config.reward.late.store is not None:
        return warning(
            CHECK,
            f"{where}: late rewards are waited for, {use.unscored or 0.0:.0f} finished responses have none yet while "
            f"{use.active or 0.0:.0f} are decoded",
            "deliver rewards sooner (reward.late.store is set); or a larger buffer.max_staleness, so that generators "
            "work ahead meanwhile",
            **numbers,
        )
    return warning(
        CHECK,
        f"{where}: rewards are the bottleneck, {use.unscored or 0.0:.0f} finished responses wait for theirs while "
        f"{use.active or 0.0:.0f} are decoded",
        "more reward services (reward.endpoints, or `rollmesh reward cfg.yaml --mesh HOST:PORT` elsewhere), or a "
        "quicker function; `rollmesh reward check` measures one",
        **numbers,
    )


def _more_generation(config: Config, where: str, waits: float, use: TimeUse) -> Finding:
    replicas = max(1, round(use.generators) or config.rollout.replicas)
    wanted = _scaled(replicas, waits)
    steps = [f"rollout.replicas={wanted} (now {replicas}), or `rollmesh generator --mesh HOST:PORT` on other machines"]
    if config.learner.ranks > 1 and config.learner.device != "cpu":
        ranks = config.learner.ranks - max(1, round(waits * config.learner.ranks / 2))
        steps.append(f"or move a device from the learner to the generators: learner.ranks={ranks}")
    if config.rollout.engine == "hf" and config.rollout.device != "cpu":
        steps.append("or rollout.engine=vllm, which decodes faster on a GPU")
    return warning(
        CHECK,
        f"{where}: generation is the bottleneck, the learner waited {waits:.0%} of its time for groups",
        "; ".join(steps),
        replicas_wanted=wanted,
        **_numbers(use),
    )


def _more_training(config: Config, where: str, idle: float, use: TimeUse) -> Finding:
    replicas = max(1, round(use.generators) or config.rollout.replicas)
    fewer = max(1, math.ceil(replicas * (1 - idle)))
    members = min(round(config.rollout.n / (1 - min(idle, 0.75))), round(_MOST * config.rollout.n))
    steps = []
    if fewer < replicas:
        learner = "" if config.learner.device == "cpu" else f", and learner.ranks={config.learner.ranks + 1}"
        steps.append(f"move a device from the generators to the learner: rollout.replicas={fewer} (now {replicas})"
                     f"{learner}")  # fmt: skip
    steps.append(f"rollout.n={members} (now {config.rollout.n}) uses the idle generators for more signal per prompt")
    return warning(
        CHECK,
        f"{where}: training is the bottleneck, generators were idle {idle:.0%} of their time",
        "; or ".join(steps),
        replicas_wanted=fewer,
        members_wanted=members,
        **_numbers(use),
    )


def _judge_phases(use: TimeUse, config: Config) -> Iterator[Finding]:
    saving = use.learner.get(CHECKPOINT, 0.0)
    publishing = use.learner.get(PUBLISH, 0.0) + use.learner.get(CLAIM, 0.0)
    if saving >= _SAVING:
        pace = config.checkpoint
        key, now = ("every_s", pace.every_s) if pace.every_steps is None else ("every_steps", pace.every_steps)
        yield warning(
            CHECK,
            f"training stood still for checkpoints {saving:.0%} of its time",
            f"checkpoint.{key}={math.ceil((now or 1) * saving / 0.05):g} (now {now:g}), or run.dir on a faster disk",
            checkpoint_share=saving,
        )
    if publishing >= _PUBLISHING:
        yield warning(
            CHECK,
            f"training waited {publishing:.0%} of its time for weights to be published and batches to be claimed",
            "see which way weights take (`rollmesh status`, `push/*`): weights.transport=auto on one host with room in "
            "/dev/shm; across hosts weights.encoding=delta, or learner.lora",
            publish_share=publishing,
        )


def _scaled(value: float, waits: float) -> int:
    return math.ceil(value * min(_MOST, 1.0 / (1.0 - min(waits, 0.99))))


def _numbers(use: TimeUse) -> dict[str, float | int | None]:
    shares: dict[str, float | int | None] = {f"learner_{phase}": share for phase, share in use.learner.items()}
    return shares | {"idle": use.idle, "reward_busy": use.reward_busy, "steps": use.steps, "seconds": use.seconds}

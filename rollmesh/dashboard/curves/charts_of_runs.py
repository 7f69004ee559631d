"""The charts of `rollmesh run`, in the order of the page. A new curve is one line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.dashboard.curves.chart import Bound, Chart, Curve
from rollmesh.dashboard.curves.columns import RecordColumns
from rollmesh.dashboard.curves.derived import AGE, GATE_SHARE, GENERATED_PER_S, LEARNER_SHARE
from rollmesh.dashboard.curves.memory import OF_SERVICE, ON_DEVICES
from rollmesh.mesh.config.models import Config
from rollmesh.report.metrics import REWARD

_PHASES = {
    "timing_s/gen": "waits for groups",
    "timing_s/prepare": "prepares",
    "timing_s/claim": "claims",
    "timing_s/update_actor": "trains",
    "timing_s/update_weights": "publishes",
    "timing_s/save_checkpoint": "saves",
}
# Ages with a curve of their own; older tokens are few, and a legend has room for so many.
_MOST_AGES = 8
_MOST_COMPONENTS = 6


def charts_of_run(
    config: Config | None, steps: RecordColumns, memory: RecordColumns, turns: Sequence[dict[str, Any]]
) -> list[Chart]:
    """All charts of a run.

    Args:
        config: of the run, for its bounds; None: not known.
        steps: with the ages of tokens (`derived.token_ages`).
        memory: of all services (`memory.memory_columns`).
        turns: on shared devices (`memory.turn_spans`).
    """
    return [*_learning(config, steps), *_staleness(config, steps), *_time(), _memory(memory, turns)]


def _memory(memory: RecordColumns, turns: Sequence[dict[str, Any]]) -> Chart:
    services = [name for name in memory.names() if name.startswith(OF_SERVICE)]
    return Chart(
        "memory",
        "time",
        "Memory of all services",
        "GiB",
        (
            *(Curve(name, name.removeprefix(OF_SERVICE), "memory", "area") for name in services),
            Curve(ON_DEVICES, "on devices", "memory"),
        ),
        note="Turns of the learner are shaded, and swaps of the devices darker." if turns else "",
        by_time=True,
        spans=turns,
    )


def _learning(config: Config | None, steps: RecordColumns) -> Sequence[Chart]:
    training, held_out = "training", "held out"
    if config is not None:
        training = f"training, T = {config.rollout.temperature:g}"
        greedy = config.eval.temperature == 0
        held_out = "held out, greedy" if greedy else f"held out, T = {config.eval.temperature:g}"
    components = [name for name in steps.names() if name.startswith("rewards/") and name.endswith("/mean")]
    return (
        Chart(
            "reward",
            "learning",
            "Reward",
            "",
            (
                Curve(REWARD, training, noisy=True),
                Curve("eval/reward", held_out, "evaluations", "points"),
            ),
            note="Training responses are sampled, also for exploration; held-out ones measure the policy. "
            "The two are not comparable unless their temperatures are the same.",
        ),
        Chart(
            "reward_parts",
            "learning",
            "Reward components",
            "",
            [
                Curve(name, name.removeprefix("rewards/").removesuffix("/mean"), noisy=True)
                for name in components[:_MOST_COMPONENTS]
            ]
            if len(components) > 1
            else (),
        ),
        Chart("entropy", "learning", "Entropy of the policy", "nats", (Curve("actor/entropy", "entropy", noisy=True),)),
        Chart(
            "kl",
            "learning",
            "KL divergence",
            "nats",
            (
                Curve("actor/ppo_kl", "from the sampling policy (k1)", noisy=True),
                Curve("actor/k3_kl", "the same (k3)", noisy=True),
                Curve("actor/reference_kl", "from the reference", noisy=True),
                Curve("actor/kl_loss", "from the reference, in the loss", noisy=True),
            ),
        ),
        Chart(
            "grad_norm",
            "learning",
            "Gradient norm",
            "",
            (Curve("actor/grad_norm", "before clipping", noisy=True),),
            bounds=_clip_bound(config),
        ),
        Chart(
            "clip",
            "learning",
            "Clipped tokens",
            "share",
            (
                Curve("actor/pg_clipfrac", "without gradient", noisy=True),
                Curve("clip_ratio/high_mean", "above the upper bound", noisy=True),
                Curve("clip_ratio/low_mean", "below the lower bound", noisy=True),
            ),
            share=True,
        ),
        Chart("loss", "learning", "Loss of the policy", "", (Curve("actor/loss", "loss", noisy=True),)),
        Chart(
            "lengths",
            "learning",
            "Response length",
            "tokens",
            (
                Curve("response_length/mean", "mean", noisy=True),
                Curve("response_length/max", "longest", noisy=True),
                Curve("eval/response_length/mean", "held out, mean", "evaluations", "points"),
            ),
        ),
        Chart(
            "cut",
            "learning",
            "Responses that the token budget cut",
            "share",
            (Curve("response_length/clip_ratio", "cut", noisy=True),),
            share=True,
        ),
        Chart(
            "signal",
            "learning",
            "Groups without a signal",
            "share",
            (Curve("frac_reward_zero_std", "all rewards equal", noisy=True),),
            note="Most algorithms learn nothing from a group in which all rewards are equal.",
            share=True,
        ),
        Chart("lr", "learning", "Learning rate", "", (Curve("actor/lr", "learning rate"),)),
        Chart(
            "value",
            "learning",
            "Critic",
            "",
            (
                Curve("critic/vf_explained_var", "explained variance", noisy=True),
                Curve("critic/vf_loss", "value loss", noisy=True),
            ),
        ),
    )


def _clip_bound(config: Config | None) -> Sequence[Bound]:
    norm = config.learner.optimizer.max_grad_norm if config is not None else None
    return (Bound(norm, "clipped above"),) if norm else ()


def _staleness(config: Config | None, steps: RecordColumns) -> Sequence[Chart]:
    ages = [name for name in steps.names() if name.startswith(AGE)][:_MOST_AGES]
    bounds = () if config is None else (Bound(config.buffer.max_staleness, "bound"),)
    return (
        Chart(
            "staleness",
            "staleness",
            "Staleness of trained tokens",
            "versions",
            (Curve("staleness/mean", "mean", noisy=True), Curve("staleness/max", "oldest", form="step")),
            bounds=bounds,
        ),
        Chart(
            "ages",
            "staleness",
            "Trained tokens by age",
            "share",
            [Curve(name, _age_label(int(name.removeprefix(AGE))), form="area") for name in ages],
            share=True,
        ),
        Chart(
            "ess",
            "staleness",
            "Effective sample size",
            "share",
            (
                Curve("rollout_corr/ratio/ess", "of the ratios", noisy=True),
                Curve("rollout_corr/rollout_is_eff_sample_size", "of the weights", noisy=True),
            ),
            note="1: the batch counts in full. It falls as the trained policy moves away from the one that sampled.",
            share=True,
        ),
        Chart(
            "ratio",
            "staleness",
            "Ratio of trained to sampling policy",
            "",
            (
                Curve("rollout_corr/ratio/p99", "99th percentile", noisy=True),
                Curve("rollout_corr/ratio/p50", "median", noisy=True),
                Curve("rollout_corr/ratio/p01", "1st percentile", noisy=True),
            ),
            bounds=(Bound(1.0, "no difference"),),
        ),
        Chart(
            "gap",
            "staleness",
            "Log-prob gap of learner and generators",
            "nats",
            (
                Curve("mismatch/log_prob_diff", "mean absolute difference", noisy=True),
                Curve("mismatch/k3_kl", "KL (k3)", noisy=True),
            ),
            note="Of responses that the trained version sampled from end to end: the difference of two "
            "implementations, not of two policies.",
        ),
        Chart(
            "rejected",
            "staleness",
            "Tokens that the correction cuts",
            "share",
            (
                Curve("rollout_corr/truncated_fraction", "ratio truncated", noisy=True),
                Curve("rollout_corr/rollout_rs_masked_fraction", "rejected", noisy=True),
            ),
            share=True,
        ),
    )


def _age_label(age: int) -> str:
    return {0: "of the trained version", 1: "1 version old"}.get(age, f"{age} versions old")


def _time() -> Sequence[Chart]:
    return (
        Chart(
            "throughput",
            "time",
            "Tokens per second",
            "tokens/s",
            (
                Curve(GENERATED_PER_S, "generated", "snapshots", noisy=True),
                Curve("tokens_per_second", "trained", noisy=True),
            ),
            by_time=True,
        ),
        Chart(
            "waits",
            "time",
            "Who waits for whom",
            "share",
            (
                Curve(LEARNER_SHARE, "learner waits for groups", "snapshots", noisy=True),
                Curve(GATE_SHARE, "generators wait for the learner", "snapshots", noisy=True),
            ),
            note="Generators wait at the gate: what they begin now would be too stale when it is trained.",
            share=True,
            by_time=True,
        ),
        Chart(
            "phases",
            "time",
            "Time of the learner's steps",
            "s",
            [Curve(metric, label, form="area") for metric, label in _PHASES.items()],
        ),
        Chart(
            "delays",
            "time",
            "Way of a group",
            "s",
            (
                Curve("delay/generating_s", "admitted to complete", noisy=True),
                Curve("delay/queued_s", "complete to trained", noisy=True),
            ),
        ),
        Chart(
            "pushes",
            "time",
            "New weights in service",
            "ms after their announcement",
            (
                Curve("push/total_ms_p50", "median"),
                Curve("push/total_ms_p99", "99th percentile"),
                Curve("push/pause_ms_p99", "pause in decoding, 99th percentile"),
            ),
        ),
        Chart(
            "mfu",
            "time",
            "Model FLOPs utilization",
            "share of the device's peak",
            (Curve("perf/mfu/actor", "actor", noisy=True), Curve("perf/mfu/critic", "critic", noisy=True)),
            share=True,
        ),
    )

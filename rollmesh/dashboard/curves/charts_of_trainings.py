"""The charts of `rollmesh sft`, `rm` and `dpo`, in the order of the page."""

from __future__ import annotations

from rollmesh.dashboard.curves.chart import Chart, Curve
from rollmesh.training.summary import HELD_OUT, LOSS


def charts_of_training() -> list[Chart]:
    """All charts of a training on data; those of other objectives have no values, and are left out."""
    return [
        Chart(
            "loss",
            "learning",
            "Loss",
            "nats per token, or of the objective",
            (Curve(LOSS, "training", noisy=True), Curve(HELD_OUT, "held out", "evaluations", "points")),
        ),
        Chart(
            "accuracy",
            "learning",
            "Pairs in the right order",
            "share",
            (
                Curve("rewards/accuracies", "training", noisy=True),
                Curve("eval/rewards/accuracies", "held out", "evaluations", "points"),
            ),
            share=True,
        ),
        Chart(
            "margins",
            "learning",
            "Margin of chosen over rejected",
            "",
            (
                Curve("rewards/margins", "training", noisy=True),
                Curve("eval/rewards/margins", "held out", "evaluations", "points"),
            ),
        ),
        Chart(
            "rewards",
            "learning",
            "Rewards",
            "",
            (Curve("rewards/chosen", "chosen", noisy=True), Curve("rewards/rejected", "rejected", noisy=True)),
        ),
        Chart(
            "logps",
            "learning",
            "Log-probs of responses",
            "nats",
            (Curve("logps/chosen", "chosen", noisy=True), Curve("logps/rejected", "rejected", noisy=True)),
        ),
        Chart("entropy", "learning", "Entropy of the policy", "nats", (Curve("actor/entropy", "entropy", noisy=True),)),
        Chart(
            "kto",
            "learning",
            "Divergence from the reference",
            "nats",
            (Curve("actor/kto_divergence", "KTO's estimate", noisy=True),),
        ),
        Chart("grad_norm", "learning", "Gradient norm", "", (Curve("actor/grad_norm", "before clipping", noisy=True),)),
        Chart("lr", "learning", "Learning rate", "", (Curve("actor/lr", "learning rate"),)),
        Chart(
            "throughput",
            "time",
            "Tokens per second",
            "tokens/s",
            (Curve("tokens_per_second", "trained", noisy=True),),
        ),
        Chart("step_time", "time", "Time of a step", "s", (Curve("timing_s/step", "step", noisy=True),)),
        Chart(
            "mfu",
            "time",
            "Model FLOPs utilization",
            "share of the device's peak",
            (Curve("perf/mfu/actor", "actor", noisy=True),),
            share=True,
        ),
    ]

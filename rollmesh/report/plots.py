"""The report's plots, as SVG text. The only module that imports matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rollmesh.report.memory import MemorySample, memory_series
from rollmesh.report.series import Curves, smoothed
from rollmesh.report.turns import PhaseChange, spans

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#3366cc", "#e07b00", "#2a9d5c", "#c0392b", "#b8bec6"
_PHASE_COLOURS = {"wait": _ORANGE, "train": _BLUE, "publish": _GREEN, "prepare": "#8fb0e6", "checkpoint": _GREY}
# More phases than these would be stripes thinner than a line.
_MOST_SPANS = 400
_SIDE_COLOURS = {"training": _BLUE, "swap": _RED}
# The time line shows at most this many bars: single steps would be noise.
_MAX_BARS = 80
# Up to so many values are marked: a curve of one value shows nothing.
_FEW_POINTS = 60


def reward_over_time(curves: Curves) -> str:
    """Training reward (smoothed) and held-out reward over seconds."""
    return _draw(lambda axes: _reward(axes, curves.seconds, curves.eval_seconds, curves, "seconds"))


def reward_over_steps(curves: Curves) -> str:
    """Training reward (smoothed) and held-out reward over steps."""
    return _draw(lambda axes: _reward(axes, curves.steps, curves.eval_steps, curves, "steps"))


def over_steps(series: Mapping[str, tuple[Sequence[int], Sequence[float | None]]], unit: str) -> str:
    """Metrics over steps, one curve each; single values as points.

    Args:
        series: steps and values by name.
        unit: of the values.
    """

    def plot(axes: Axes) -> None:
        for (name, (steps, values)), color in zip(series.items(), (_GREY, _BLUE, _ORANGE), strict=False):
            marker = "o" if len(steps) <= _FEW_POINTS else ""
            axes.plot(steps, smoothed(values, 1), color=color, marker=marker, markersize=3, label=name)
        axes.set(xlabel="steps", ylabel=unit)

    return _draw(plot)


def staleness_over_steps(curves: Curves, bound: int) -> str:
    """Mean and largest age of trained tokens, with the bound."""

    def plot(axes: Axes) -> None:
        axes.plot(curves.steps, smoothed(curves.staleness_mean), color=_BLUE, label="mean (smoothed)")
        axes.plot(curves.steps, smoothed(curves.staleness_max, 1), color=_GREY, label="oldest", linewidth=0.8)
        axes.axhline(bound, color=_RED, linestyle="--", linewidth=1, label="bound")
        axes.set(xlabel="steps", ylabel="versions", ylim=(0, bound + 1))

    return _draw(plot)


def staleness_histogram(histogram: dict[str, int]) -> str:
    """Numbers of trained tokens by age."""

    def plot(axes: Axes) -> None:
        axes.bar(list(histogram), list(histogram.values()), color=_BLUE, label="tokens")
        axes.set(xlabel="age in versions", ylabel="trained tokens")

    return _draw(plot)


def throughput(curves: Curves) -> str:
    """Tokens per second generated and trained."""

    def plot(axes: Axes) -> None:
        axes.plot(curves.snapshot_seconds, smoothed(curves.generated_per_s), color=_ORANGE, label="generated")
        axes.plot(curves.seconds, smoothed(curves.trained_per_s), color=_BLUE, label="trained")
        axes.set(xlabel="seconds", ylabel="tokens per second")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)

    return _draw(plot)


def who_waited(curves: Curves) -> str:
    """The learner's phases in each stretch of the run, as shares, and the generators' time at the gate."""

    def plot(axes: Axes) -> None:
        stride = max(1, -(-len(curves.seconds) // _MAX_BARS))
        ends = curves.seconds[stride - 1 :: stride]
        starts = [0.0, *ends[:-1]]
        floor = [0.0] * len(ends)
        for name, values in curves.phases.items():
            totals = [sum(values[index * stride : (index + 1) * stride]) for index in range(len(ends))]
            shares = [
                min(1.0, total / (end - start)) if end > start else 0.0
                for total, start, end in zip(totals, starts, ends, strict=True)
            ]
            label = "learner waits" if name == "wait" else f"learner: {name}"
            widths = [end - start for start, end in zip(starts, ends, strict=True)]
            axes.bar(
                *(starts, shares, widths, floor),
                align="edge",
                color=_PHASE_COLOURS.get(name, _RED),
                label=label,
                linewidth=0,
            )
            floor = [low + share for low, share in zip(floor, shares, strict=True)]
        gate = smoothed(curves.gate_share)
        axes.plot(curves.snapshot_seconds, gate, color="black", linewidth=1, label="generators at the gate")
        axes.set(xlabel="seconds", ylabel="share of time", ylim=(0, 1.05))
        axes.set_xlim(left=0)

    return _draw(plot, height=3.0)


def memory_over_time(samples: Sequence[MemorySample], phases: Sequence[PhaseChange], end: float) -> str:
    """Anonymous memory of all services, stacked, and memory of devices in all, with the phases of turns behind them.

    Args:
        samples: in the order of time, at least one.
        phases: of turns; empty without shared devices.
        end: of the last phase, in Unix seconds.
    """
    start = samples[0].unix_s
    seconds = [sample.unix_s - start for sample in samples]
    services, devices = memory_series(samples, "anon"), memory_series(samples, "device")

    def plot(axes: Axes) -> None:
        told: set[str] = set()
        sides = list(spans(phases, min(end, samples[-1].unix_s)))
        for began, ended, side in sides if len(sides) <= _MOST_SPANS else ():
            if side in _SIDE_COLOURS and ended > start:
                label = None if side in told else side
                axes.axvspan(
                    max(0.0, began - start),
                    ended - start,
                    color=_SIDE_COLOURS[side],
                    alpha=0.18,
                    linewidth=0,
                    label=label,
                )
                told.add(side)
        axes.stackplot(seconds, *services.values(), labels=list(services), alpha=0.75)
        if devices:
            total = [sum(values) for values in zip(*devices.values(), strict=True)]
            axes.plot(seconds, total, color="black", linewidth=1, label="on devices")
        axes.set(xlabel="seconds", ylabel="GiB of their own")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)

    return _draw(plot, height=3.4)


def _reward(axes: Axes, x: Sequence[float], eval_x: Sequence[float], curves: Curves, unit: str) -> None:
    axes.plot(x, smoothed(curves.reward), color=_GREY, label="training (smoothed)")
    axes.plot(eval_x, smoothed(curves.held_out, 1), color=_BLUE, marker="o", markersize=3, label="held out")
    axes.set(xlabel=unit, ylabel="reward")


def _draw(plot: Callable[[Axes], None], height: float = 3.0) -> str:
    # Texts stay texts (searchable, small); ids do not depend on the moment.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rollmesh", "font.size": 9}):
        figure = Figure(figsize=(7.6, height), layout="constrained")
        axes = figure.add_subplot()
        plot(axes)
        axes.grid(visible=True, color="#e6e8eb", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)

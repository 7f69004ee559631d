"""Memory of a run's services over time as a plot, with the phases of turns in the background, as SVG text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rollmesh.report.memory import MemorySample, memory_series
from rollmesh.report.turns import PhaseChange, spans

# More phases than these would be stripes thinner than a line.
_MOST_SPANS = 400
_SIDE_COLOURS = {"training": "#3366cc", "swap": "#c0392b"}


def memory_over_time(samples: Sequence[MemorySample], phases: Sequence[PhaseChange], end: float) -> str:
    """Anonymous memory of all services, stacked, and memory of devices in all, with the phases of turns.

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

    return _draw(plot)


def _draw(plot: Callable[[Axes], None]) -> str:
    # Texts stay texts (searchable, small); ids do not depend on the moment.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rollmesh", "font.size": 9}):
        figure = Figure(figsize=(7.6, 3.4), layout="constrained")
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

"""`report.html`: a run on one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import write_atomically
from rollmesh.report.evals import result_grid
from rollmesh.report.memory import memory_grid, read_memory
from rollmesh.report.metrics import read_metrics, run_records
from rollmesh.report.placement import placement_lines
from rollmesh.report.pushes import push_rows, read_receivers
from rollmesh.report.samples import read_samples
from rollmesh.report.series import build_curves
from rollmesh.report.speed import speed_lines
from rollmesh.report.stalls import read_stalls, stall_grid
from rollmesh.report.summary import FinalState, Summary, build_summary, read_summary
from rollmesh.report.turns import read_phases, share_lines, swap_lines, turns_ended
from rollmesh.run_files import config_path, read_config

FILE = "report.html"
_SAMPLES = 8


def write_report(folder: Path) -> Path:
    """Writes the report of a run folder; a run in progress is reported as far as it went.

    Raises:
        DataError: the folder is not a run folder, or it has neither metrics nor a summary yet.
    """
    config = read_config(folder)
    try:
        summary = read_summary(folder)
    except DataError as error:
        if not run_records(folder):
            hint = "train a step first"
            raise DataError(f"nothing to report in {folder}: it has no metrics yet", hint=hint) from error
        summary = build_summary(folder, config, FinalState())
    path = folder / FILE
    write_atomically(path, _page(folder, config, summary))
    return path


def fill_page(**parts: str) -> str:
    """The page with its parts, each HTML, by the names that the template has; the title is a text."""
    page = resources.files("rollmesh.report").joinpath("report.template.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace(f"{{{{{name}}}}}", escape(part) if name == "title" else part)
    return page


def draw_plots(drawn: Sequence[tuple[str, str]]) -> str:
    """Plots under their titles."""
    return "\n".join(f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in drawn)


def _page(folder: Path, config: Config, summary: Summary) -> str:
    return fill_page(
        title=f"Rollmesh: {summary.run}",
        plots=_plots(folder, config, summary),
        summary=table(_rows(summary)),
        pushes=grid(push_rows(summary, read_receivers(folder))),
        stalls=grid(stall_grid(read_stalls(folder))),
        memory=grid(memory_grid(summary.memory_by_phase_mb)),
        evals=grid(result_grid(folder) or [["no held-out data"]]),
        samples=_samples(folder),
        config=escape(config_path(folder).read_text(encoding="utf-8")),
    )


def _plots(folder: Path, config: Config, summary: Summary) -> str:
    records, memory = run_records(folder), read_memory(folder)
    drawn = build_curves(records, read_metrics(folder / "mesh.jsonl"))
    if not (drawn.steps or drawn.eval_steps or drawn.snapshot_seconds):
        return "<p>Nothing was generated, trained or evaluated.</p>"
    # Matplotlib takes half a second.
    from rollmesh.report import plots

    sections = [
        ("Reward over time", plots.reward_over_time(drawn)),
        ("Reward over steps", plots.reward_over_steps(drawn)),
        ("Staleness", plots.staleness_over_steps(drawn, config.buffer.max_staleness)),
        ("Throughput", plots.throughput(drawn)),
        ("Who waited", plots.who_waited(drawn)),
    ]
    if summary.staleness:
        sections.insert(3, ("Ages of trained tokens", plots.staleness_histogram(summary.staleness)))
    if memory:
        drawing = plots.memory_over_time(memory, read_phases(folder), turns_ended(records))
        sections.append(("Memory of all services", drawing))
    return draw_plots(sections)


def _rows(summary: Summary) -> Iterator[tuple[str, str]]:
    def show(value: float | None, form: str, unit: str = "") -> str:
        return "-" if value is None else f"{value:{form}}{unit}"

    yield "ended", summary.ended or "not known"
    held_out = f"{show(summary.held_out_first, '.3f')} → {show(summary.held_out_last, '.3f')}"
    yield "held-out reward", "; ".join(filter(None, (held_out, summary.not_evaluated)))
    yield "steps", str(summary.steps)
    yield "training", f"{summary.training_s:.1f} s (whole launch {summary.wall_s:.1f} s)"
    yield "tokens/s generated", show(summary.tokens_per_s_generated, ",.0f")
    yield "tokens/s trained", show(summary.tokens_per_s_trained, ",.0f")
    if summary.speed:
        yield "speed of the learner's steps", ", ".join(speed_lines(summary.speed))
    yield "groups", _pairs(summary.groups_by_fate, "d")
    for table, ledger in summary.ledger.items():
        yield f"ledger of {table}", "; ".join(ledger["discrepancies"]) or "balances"
        if ledger["reasons"]:
            yield f"reasons in {table}", _pairs(ledger["reasons"], "d")
        if ledger["causes"]:
            causes = ledger["causes"].items()
            yield (
                f"causes of the latest failures in {table}",
                "; ".join(f"{cause} ({count})" for cause, count in causes),
            )
    yield "members of trained groups without a reward", summary.unscored_text() or "none"
    yield "failed groups", "; ".join(summary.failures()) or "none"
    yield "waited, in seconds", _pairs(summary.waiting_s, ".1f")
    yield "peak memory, MiB", _pairs(summary.peak_memory_mb, ".0f")
    yield "placement", "; ".join((*placement_lines(summary.placement), *share_lines(summary.swaps))) or "not known"
    yield "swaps of shared devices", "; ".join(swap_lines(summary.swaps)) or "none"
    yield "restarts", summary.restarts_text() or "none"


def _pairs(values: dict[str, int] | dict[str, float], form: str) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:{form}}" for name, value in values.items())


def table(rows: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> str:
    """Names and texts, side by side."""
    return "\n".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)


def grid(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    head, *body = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in _tagged(rows))
    return "\n".join(f"<tr>{line}</tr>" for line in (head, *body))


def _tagged(rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, Sequence[str]]]:
    for index, row in enumerate(rows):
        yield "td" if index else "th", row


def _samples(folder: Path) -> str:
    try:
        samples = read_samples(folder, worst=False, number=_SAMPLES)
    except DataError:
        return "<tr><td>none were kept</td></tr>"
    head = "<tr><th>step</th><th>prompt</th><th>response</th><th>truth</th><th>reward</th></tr>"
    fields = ("step", "prompt", "response", "ground_truth", "reward")
    lines = (
        "<tr>" + "".join(f"<td>{escape(str(sample.get(field, '')))}</td>" for field in fields) + "</tr>"
        for sample in samples
    )
    return "\n".join((head, *lines))

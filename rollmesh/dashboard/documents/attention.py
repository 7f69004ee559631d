"""Things that a reader should look at, each with its remedy; none where all is well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rollmesh.dashboard.run_view import RunView
from rollmesh.mesh.tables import TRAIN
from rollmesh.report.branches import Branches
from rollmesh.report.equal_rewards import HIGHEST, LOWEST, REMEDY, equal_rewards
from rollmesh.report.failures import failures_text
from rollmesh.report.restarts import read_restarts
from rollmesh.report.stalls import read_stalls
from rollmesh.run_files import RUN

# From this share of responses without a reward on it is more than a few odd prompts.
_MANY_UNSCORED = 0.05
# Last steps that are looked at for a difference between rewards, and the least there have to be.
_LATEST, _LEAST = 20, 5


def attention_document(view: RunView) -> dict[str, Any]:
    """`items` of `level` (`error`, `warning`, `note`), `text` and `remedy`, the worst first."""
    order = ("error", "warning", "note")
    items = sorted(_items(view), key=lambda item: order.index(item[0]))
    return {"items": [{"level": level, "text": text, "remedy": remedy} for level, text, remedy in items]}


def _items(view: RunView) -> Iterator[tuple[str, str, str]]:
    yield from _of_mesh(view)
    yield from _of_folder(view)
    yield from _of_metrics(view)


def _of_mesh(view: RunView) -> Iterator[tuple[str, str, str]]:
    mesh = view.mesh
    if mesh is None:
        return
    if mesh.stall:
        yield "error", f"nothing moves {mesh.stall}", "`rollmesh ledger --failed` and the services' logs say more"
    if mesh.table is not None and (text := failures_text(TRAIN, mesh.table.counts.reasons)):
        yield "warning", text, "their causes are below, under Ledger"
    if view.folder is None and mesh.unscored:
        yield (
            "warning",
            mesh.unscored,
            "a response without a reward is not trained: the logs of the reward services say more",
        )


def _of_folder(view: RunView) -> Iterator[tuple[str, str, str]]:
    if (summary := view.run_summary) is not None:
        for text in summary.failures():
            yield "warning", text, "their causes are below, under Ledger"
        for name, ledger in summary.ledger.items():
            for discrepancy in ledger["discrepancies"]:
                yield "error", f"ledger of {name}: {discrepancy}", "please report it with the run's logs"
        if text := Branches.from_wire(summary.branches).warning:
            yield "warning", text, "send answers back as they came, and only add messages"
        if summary.not_evaluated:
            yield "note", summary.not_evaluated, ""
    if view.folder is None or view.command != RUN:
        return
    for service, reasons in read_restarts(view.folder).items():
        told = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
        yield "note", f"{service} was started again ({told})", f"logs/{service}.log says why"
    stalls = read_stalls(view.folder)
    if stalls:
        seconds = sum(stall.seconds for stall in stalls)
        yield "note", f"{len(stalls)} stalls of {seconds:.0f} s in all", "they are listed below, under Stalls"


def _of_metrics(view: RunView) -> Iterator[tuple[str, str, str]]:
    steps, unscored = view.steps, view.unscored
    if unscored.codes:
        many = unscored.codes.total() > _MANY_UNSCORED * unscored.members
        remedy = "more reward workers, or a longer reward.timeout_s, where the code is a timeout"
        yield "warning" if many else "note", unscored.text(), remedy
    lowest, highest = (_latest(view, metric) for metric in (LOWEST, HIGHEST))
    if len(lowest) >= _LEAST and (same := equal_rewards(lowest, highest, f"the last {len(lowest)} steps")):
        yield "warning", same, REMEDY
    if warning := steps.text("mismatch_warning"):
        yield "warning", warning, "see docs/algorithms.md on the log-probs of generators and learner"
    if skipped := steps.total("skipped_updates"):
        yield "warning", f"{skipped:.0f} optimizer steps were left out: gradients not finite", "lower the learning rate"
    if lost := steps.last("trackers/lost_records"):
        yield "note", f"trackers have not taken {lost:.0f} records", "metrics.jsonl has them all"
    if errors := steps.last("push/errors"):
        yield "note", f"{errors:.0f} transfers of weights have failed and were tried again", "see Weights below"
    if failed := steps.last("checkpoint/failed"):
        yield "error", f"{failed:.0f} checkpoints were refused by a disk", "free space there, or move checkpoint.dir"


def _latest(view: RunView, metric: str) -> list[float]:
    """A metric of the last steps that have it."""
    column = view.steps.column(metric)
    return [float(value) for value in column[~np.isnan(column)][-_LATEST:]]

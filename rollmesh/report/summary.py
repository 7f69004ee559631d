"""`summary.json`: a run in one page of numbers.

Invariant: it is made from the services' records (`metrics.jsonl`) and the buffer's last answers; nothing is estimated,
and unknown values are null.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.learner.checkpoint.best import best_checkpoint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.learner.control_requests import REQUEST
from rollmesh.learner.recovery.run_identity import LEARNER_JSON
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.tables import TRAIN
from rollmesh.report.branches import Branches
from rollmesh.report.failures import failures_text
from rollmesh.report.graders import grader_versions
from rollmesh.report.memory import memory_line
from rollmesh.report.metrics import Record, is_evaluation, is_training, metric_value, read_metrics, run_records
from rollmesh.report.restarts import read_restarts
from rollmesh.report.speed import speed_of
from rollmesh.report.stalls import read_stalls
from rollmesh.report.summary_file import SummaryValues, keep_summary, kept_summary
from rollmesh.report.turns import read_phases, share_lines, swap_lines, swap_times, time_shares, turns_ended
from rollmesh.report.unscored import UnscoredMembers
from rollmesh.run_files import SNAPSHOTS, SUMMARY

if TYPE_CHECKING:
    from rollmesh.protos import buffer_pb2

_BY = "eval/measured_by"
_CAUSES = 10


@dataclass
class FinalState:
    """The launcher's own knowledge at the end of a run.

    Attributes:
        tables, ledgers: last answers of the buffer by table name.
        peak_memory_bytes: by service.
        memory_by_phase_mb: see `Summary`.
        wall_s: seconds from the launcher's start to its end, start-up of the services included.
        ended: see `Summary`.
        placement: see `Summary`.
    """

    tables: dict[str, buffer_pb2.DescribeResponse] = field(default_factory=dict)
    ledgers: dict[str, buffer_pb2.LedgerResponse] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    memory_by_phase_mb: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    wall_s: float = 0.0
    ended: str = ""
    placement: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary(SummaryValues):
    """A finished (or ended) run.

    Attributes:
        run, folder: name and folder.
        held_out_first, held_out_last: mean held-out reward of the first and the last evaluation, of those that were
            measured as the last one was.
        held_out: every evaluation: step, seconds since the first version, reward.
        ended: how the last launch did: `finished`, `interrupted`, or the error that ended it; empty: not known.
        steps: batches trained on the surviving lineage.
        training_s: seconds from the first version to the last step, waiting included.
        wall_s: seconds of the last launch in all.
        tokens_per_s_generated: sampled tokens, those of evaluations and of groups never trained included, over the time
            from the first version to the last step or evaluation. Those sampled after the generators' last report count
            only where they were trained.
        tokens_per_s_trained: response tokens that were trained.
        groups_by_fate: trained, evicted_stale, filtered, failed, and `live` for groups without a fate at the end.
        ledger: table -> counters, the discrepancies of the recount, and the most frequent causes of the latest
            failures.
        staleness: age in versions -> trained tokens.
        waiting_s: seconds of waiting by waiter and cause.
        weight_push_ms: p50 and p99 from announcement to service, to the first byte, the last byte, the report (`ack`),
            and of the pause in decoding.
        peak_memory_mb: by service.
        restarts: over all launches, by service and reason (`exit`: it ended; `frozen`: it did not answer; `hung`: it
            found itself hanging).
        unscored: of the trained groups: all members, those without a reward by code, and the newest cause.
        branches: turns of agents in trajectories, and those in branches, which are not trained, by cause.
        stalls: beginning, duration, holders of groups and end of each stall.
        graders: versions of this mesh's own scorers by name, and of the packages that grade mathematics for them.
        speed: medians over the steps of the learner's metrics by role (`timing_s/infer/<role>`, `perf/mfu/<role>` ...),
            and the largest memory.
        memory_by_phase_mb: highest memory of the last launch by phase of turns on shared devices, and by service:
            `anon` of its processes alone, `shared`, `device`. The service `all` is all of them at one moment.
        swaps: time of swaps of shared devices (`report.turns.swap_times`), and the share of each side
            (`report.turns.time_shares`).
        placement: `mode` in which the run has ended, the `asked` one, and with `auto` its estimates, measurements and
            cost (`launcher.trials.record.PlacementRecord`).
        checkpoint, best_checkpoint: folders of the newest checkpoint and of the one that was evaluated best; None
            without one.
        not_evaluated: the last step has no held-out reward, and how to get one. Empty where it has one, without
            held-out data, and for a run in progress.
        ended_early: why a finished run has ended before `learner.steps`; empty where it has not, and of other runs.
    """

    run: str
    folder: str
    ended: str
    held_out_first: float | None
    held_out_last: float | None
    held_out: list[dict[str, float | None]]
    steps: int
    training_s: float
    wall_s: float
    tokens_per_s_generated: float | None
    tokens_per_s_trained: float | None
    groups_by_fate: dict[str, int]
    ledger: dict[str, Any]
    staleness: dict[str, int]
    waiting_s: dict[str, float]
    weight_push_ms: dict[str, float | None]
    peak_memory_mb: dict[str, float]
    restarts: dict[str, dict[str, int]]
    unscored: dict[str, Any]
    stalls: list[dict[str, Any]]
    graders: dict[str, str]
    speed: dict[str, float]
    memory_by_phase_mb: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    swaps: dict[str, float] = field(default_factory=dict)
    placement: dict[str, Any] = field(default_factory=dict)
    not_evaluated: str = ""
    checkpoint: str | None = None
    best_checkpoint: str | None = None
    ended_early: str = ""
    branches: dict[str, Any] = field(default_factory=lambda: Branches().to_wire())

    def lines(self) -> Iterator[str]:
        """The summary for a terminal."""
        yield f"ended: {self.ended or 'not known'}{f', {self.ended_early}' if self.ended_early else ''}"
        held_out = (
            f"held-out reward {_show(self.held_out_first)} -> {_show(self.held_out_last)}{self._held_out_at()} in "
        )
        yield f"{held_out if self.held_out else ''}{self.steps} steps"
        if self.not_evaluated:
            yield self.not_evaluated
        yield (
            f"{self.training_s:.1f} s from the first version to the last step, "
            f"{_show(self.tokens_per_s_generated, '.0f')} tokens/s generated, "
            f"{_show(self.tokens_per_s_trained, '.0f')} trained"
        )
        yield "groups: " + ", ".join(f"{name} {count}" for name, count in self.groups_by_fate.items())
        for table, state in self.ledger.items():
            found = state["discrepancies"]
            yield f"ledger of {table}: {'balances' if not found else '; '.join(found)}"
        if unscored := self.unscored_text():
            yield unscored
        if branches := Branches.from_wire(self.branches).text:
            yield branches
        yield from self.failures()
        if self.restarts:
            yield f"restarts: {self.restarts_text()}"
        if self.stalls:
            seconds = sum(stall["seconds"] for stall in self.stalls)
            yield f"{len(self.stalls)} stalls of {seconds:.0f} s in all: see the report"
        if text := self.placement.get("text"):
            yield f"placement {text}"
        if self.swaps:
            before = " before it was split" if self.placement.get("mode") == "split" else ""
            yield f"shared devices{before}: " + "; ".join((*swap_lines(self.swaps), *share_lines(self.swaps)))
        if line := memory_line(self.memory_by_phase_mb):
            yield line
        if self.graders:
            yield "graders: " + ", ".join(f"{name} {version}" for name, version in self.graders.items())
        if self.checkpoint is not None:
            yield f"checkpoint: {self.checkpoint}; `rollmesh export {self.folder} OUT` makes a model of it"
            if self.best_checkpoint not in (None, self.checkpoint):
                yield f"best checkpoint: {self.best_checkpoint}; `--checkpoint best` exports that one"
        yield f"summary: {Path(self.folder) / SUMMARY}"

    def _held_out_at(self) -> str:
        """The step of the last held-out reward, where that is not the last step."""
        step = self.held_out[-1]["step"] if self.held_out else self.steps
        return "" if step == self.steps else f" (at step {step})"

    def unscored_text(self) -> str:
        """Members of trained groups without a reward, in words; empty where all have one."""
        return UnscoredMembers.from_wire(self.unscored).text()

    def failures(self) -> Iterator[str]:
        """Failed groups and their reasons, by table, in words; empty where none has failed."""
        for table, ledger in self.ledger.items():
            if text := failures_text(table, ledger["reasons"], ledger["causes"]):
                yield text

    def restarts_text(self) -> str:
        """Restarted services and reasons, in words; empty without restarts."""
        return ", ".join(
            f"{service} {count} ({reason})"
            for service, reasons in self.restarts.items()
            for reason, count in reasons.items()
        )


def build_summary(folder: Path, config: Config, final: FinalState) -> Summary:
    """Combines the contents of a run folder and the launcher's knowledge."""
    records = run_records(folder)
    steps = [record for record in records if is_training(record)]
    evaluations = sorted((record for record in records if is_evaluation(record)), key=lambda item: int(item["step"]))
    held_out = [
        record["eval/reward"]
        for record in evaluations
        if record["eval/reward"] is not None and record.get(_BY) == evaluations[-1].get(_BY)
    ]
    training_s = _last(steps, "wall_s") or 0.0
    table = final.tables.get(TRAIN)
    unscored = UnscoredMembers()
    unscored.add(steps)
    newest, best = checkpoint_folders(folder)
    return Summary(
        run=config.run.name,
        folder=str(config.run.folder),
        ended=final.ended,
        held_out_first=held_out[0] if held_out else None,
        held_out_last=held_out[-1] if held_out else None,
        held_out=[
            {
                "step": int(record["step"]),
                "seconds": metric_value(record, "wall_s"),
                "reward": metric_value(record, "eval/reward"),
            }
            for record in evaluations
        ],
        steps=int(steps[-1]["step"]) if steps else 0,
        training_s=round(training_s, 3),
        wall_s=round(final.wall_s, 3),
        tokens_per_s_generated=_generated_per_s(
            records,
            read_metrics(folder / SNAPSHOTS),
            trained=(_last(steps, "total/tokens") or 0.0) / config.buffer.max_reuse,
        ),
        tokens_per_s_trained=_rate(_last(steps, "total/tokens"), training_s),
        groups_by_fate=_fates(final),
        ledger={name: _ledger(answer) for name, answer in final.ledgers.items()},
        staleness=_histogram(steps),
        waiting_s={
            "learner_for_groups": table.waiting_for_inserts_ms / 1000 if table else 0.0,
            "generators_at_the_gate": table.waiting_for_samples_ms / 1000 if table else 0.0,
        },
        weight_push_ms={
            "p50": _last(steps, "push/total_ms_p50"),
            "p99": _last(steps, "push/total_ms_p99"),
            **{
                f"{stage}_{quantile}": _last(steps, f"push/{stage}_ms_{quantile}")
                for stage in ("first_byte", "last_byte", "pause", "ack")
                for quantile in ("p50", "p99")
            },
        },
        peak_memory_mb={name: round(size / 2**20, 1) for name, size in sorted(final.peak_memory_bytes.items())},
        restarts=read_restarts(folder),
        unscored=unscored.to_wire(),
        branches=Branches.of(steps).to_wire(),
        stalls=[asdict(stall) for stall in read_stalls(folder)],
        graders=grader_versions(config),
        speed=speed_of(steps),
        memory_by_phase_mb=final.memory_by_phase_mb,
        swaps=swap_times(steps) | time_shares(read_phases(folder), turns_ended(steps)),
        placement=final.placement or {"mode": config.placement.mode},
        not_evaluated=_not_evaluated(config, final.ended, steps, evaluations),
        checkpoint=newest,
        best_checkpoint=best,
        ended_early=_ended_early(folder, config) if final.ended == "finished" else "",
    )


def checkpoint_folders(folder: Path) -> tuple[str | None, str | None]:
    """The folders of a run's newest checkpoint and of its best one; None without one.

    Raises:
        DataError: the file about the best checkpoint cannot be read.
    """
    root = folder / CHECKPOINTS_NAME
    found, best = list_checkpoints(root), best_checkpoint(root)
    return (str(found[-1][1]) if found else None, None if best is None else str(root / best.checkpoint))


def write_summary(folder: Path, config: Config, final: FinalState) -> Summary:
    """Builds the summary of a run folder and writes it there."""
    summary = build_summary(folder, config, final)
    keep_summary(folder, summary)
    return summary


def read_summary(folder: Path) -> Summary:
    """The summary in a run folder.

    Raises:
        DataError: no summary, or one of another program.
    """
    return kept_summary(Summary, folder)


def _not_evaluated(config: Config, ended: str, steps: Sequence[Record], evaluations: Sequence[Record]) -> str:
    """See `Summary.not_evaluated`."""
    last = int(steps[-1]["step"]) if steps else 0
    if config.data.eval is None or not ended or not last or any(int(one["step"]) == last for one in evaluations):
        return ""
    if ended == "finished":
        return f"step {last} has no held-out reward: its evaluation has failed, and learner.log says why"
    return (
        f"step {last} has no held-out reward: the run ended before its evaluation. `rollmesh run` with the same "
        f"configuration continues, and evaluates the last step; with --learner.steps={last} it does only that"
    )


def _ended_early(folder: Path, config: Config) -> str:
    """See `Summary.ended_early`."""
    try:
        reason = json.loads((folder / LEARNER_JSON).read_text(encoding="utf-8"))["stop_reason"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return {
        "stop_at": f"for the held-out reward has reached eval.stop_at ({config.eval.stop_at})",
        "end_of_data": "for the data have ended: see data.epochs",
        REQUEST: "for its end was asked for",
    }.get(reason, "")


def _fates(final: FinalState) -> dict[str, int]:
    answer = final.ledgers.get(TRAIN)
    if answer is None:
        return {}
    counts = answer.counters
    live = counts.generating + counts.ready + counts.leased + counts.consumed
    fates = {name: int(getattr(counts, name)) for name in ("trained", "evicted_stale", "filtered", "failed")}
    return {**fates, "live": live}


def _ledger(answer: buffer_pb2.LedgerResponse) -> dict[str, Any]:
    counters = {
        descriptor.name: getattr(answer.counters, descriptor.name)
        for descriptor in answer.counters.DESCRIPTOR.fields
        if descriptor.name != "reasons"
    }
    return {
        "counters": counters,
        "reasons": dict(answer.counters.reasons),
        "discrepancies": list(answer.discrepancies),
        "causes": dict(
            Counter(cause for group in answer.failed for cause in group.causes if cause).most_common(_CAUSES)
        ),
    }


def _histogram(steps: Sequence[Record]) -> dict[str, int]:
    total: dict[int, int] = {}
    for record in steps:
        histogram = record.get("staleness/histogram")
        if isinstance(histogram, Mapping):
            for age, count in histogram.items():
                total[int(age)] = total.get(int(age), 0) + int(count)
    return {str(age): total[age] for age in sorted(total)}


def _generated_per_s(records: Sequence[Record], snapshots: Sequence[Record], trained: float) -> float | None:
    """All tokens over the run's own clock, which stands still between launches; None where none was seen.

    Args:
        trained: tokens that were sampled, since they were trained. The total counts these at least: a generator's last
            snapshot may precede its report of them.
    """
    seconds = max((metric_value(record, "wall_s") or 0.0 for record in records), default=0.0)
    return _rate(max(_last(snapshots, "generated_tokens") or 0.0, trained) or None, seconds)


def _last(records: Sequence[Record], name: str) -> float | None:
    for record in reversed(records):
        value = record.get(name)
        if isinstance(value, int | float):
            return float(value)
    return None


def _rate(amount: float | None, seconds: float) -> float | None:
    return round(amount / seconds, 1) if amount is not None and seconds > 0 else None


def _show(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)

"""Incidents of a run: its end, restarts, stalls, transfers, checkpoints, a ledger that differs, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import psutil

from rollmesh.doctor.after.run_records import RunRecords
from rollmesh.doctor.findings import Finding, note, ok, problem, warning

END, RESTARTS, STALLS, TRANSFERS, CHECKPOINTS, LEDGER, MEMORY = (
    *("end", "restarts", "stalls", "weights", "checkpoints"),
    *("ledger", "memory"),
)
_REASONS = {
    "exit": "it ended by itself: the last lines of RUN/logs/{}.log say why; killed without a word is mostly memory "
    "(`dmesg | grep -i oom`)",
    "frozen": "it did not answer: a machine that swaps, or a library that holds the interpreter; "
    "resources.frozen_after_s is the patience",
    "hung": "it hung in a step: RUN/logs/{}.log has the stacks of its threads",
}
_FULL = 0.9


def judge_incidents(run: RunRecords) -> Iterator[Finding]:
    """Findings about everything that has happened."""
    yield from _end(run)
    yield from judge_restarts(run.restarts)
    yield from _stalls(run)
    yield from _transfers(run)
    yield from _checkpoints(run)
    if run.summary is not None:
        yield from judge_ledger({name: table["discrepancies"] for name, table in run.summary.ledger.items()})
        yield from judge_memory(run.summary.peak_memory_mb, psutil.virtual_memory().total)


def _end(run: RunRecords) -> Iterator[Finding]:
    if run.cut_short:
        yield problem(
            END,
            f"the launcher was killed after {len(run.steps)} steps, or its machine went down",
            "the same `rollmesh run` continues at the last checkpoint; `dmesg | grep -i oom` shows if memory was",
        )
        return
    if run.summary is None:
        yield note(END, "there is no summary: the services were started by hand, or have not ended")
        return
    ended = run.summary.ended
    if ended == "finished":
        yield ok(END, f"finished after {run.summary.steps} steps")
    elif ended == "interrupted":
        yield note(END, f"interrupted after {run.summary.steps} steps", "the same `rollmesh run` continues it")
    else:
        yield problem(
            END,
            f"ended after {run.summary.steps} steps: {ended or 'the cause is not known'}",
            "mend that (RUN/logs has each service's log); the same `rollmesh run` continues at the last checkpoint",
        )
    if run.summary.not_evaluated:
        yield note(END, run.summary.not_evaluated)


def judge_restarts(restarts: Mapping[str, Mapping[str, int]]) -> Iterator[Finding]:
    """Judges restarts by service and reason."""
    for service, reasons in restarts.items():
        for reason, count in reasons.items():
            why = _REASONS.get(reason, "see RUN/logs/{}.log").format(service)
            yield warning(RESTARTS, f"{service} was started again {count} time(s) ({reason})", why, count=count)
    if not restarts:
        yield ok(RESTARTS, "none")


def _stalls(run: RunRecords) -> Iterator[Finding]:
    if not run.stalls:
        yield ok(STALLS, "none")
        return
    longest = max(run.stalls, key=lambda stall: stall.seconds)
    seconds = sum(stall.seconds for stall in run.stalls)
    yield warning(
        STALLS,
        f"{len(run.stalls)} stall(s) of {seconds:.0f} s in all; the longest, {longest.seconds:.0f} s: {longest.held}",
        "the service that is named there held the groups: its log of that time says what it did",
        seconds=seconds,
    )


def _transfers(run: RunRecords) -> Iterator[Finding]:
    errors, count = run.last("push/errors") or 0.0, run.last("push/count") or 0.0
    if errors:
        yield warning(
            TRANSFERS,
            f"{errors:.0f} transfer(s) of weights failed or did not match their digests; {count:.0f} succeeded",
            "RUN/report.html has the cause by generator (table of pushes). weights.timeout_s for slow links, room in "
            "/dev/shm for shared memory; `rollmesh weights verify` compares what is served",
            errors=errors,
        )
    elif count:
        yield ok(TRANSFERS, f"{count:.0f} transfers, none failed")


def _checkpoints(run: RunRecords) -> Iterator[Finding]:
    failed, copies = run.last("checkpoint/failed") or 0.0, run.last("checkpoint/copies_failed") or 0.0
    if failed:
        yield problem(
            CHECKPOINTS,
            f"{failed:.0f} checkpoint(s) could not be written",
            "free the disk of run.dir (`df -h`), or checkpoint.keep=1",
            failed=failed,
        )
    if copies:
        yield warning(
            CHECKPOINTS,
            f"checkpoint.copy_to could not be brought up to date {copies:.0f} time(s)",
            "see learner.log: the store's login, its package for fsspec, or the link",
            failed=copies,
        )


def judge_ledger(discrepancies: Mapping[str, list[str]]) -> Iterator[Finding]:
    """Judges the recount of each table.

    Args:
        discrepancies: in words, by table.
    """
    for table, differences in discrepancies.items():
        if differences:
            yield problem(
                LEDGER,
                f"the ledger of {table} differs from the recount: {'; '.join(differences)}",
                "groups were lost or counted twice, which must not happen: keep RUN/logs and RUN/redis, and report it",
            )
    if discrepancies and not any(discrepancies.values()):
        yield ok(LEDGER, "every group is accounted for")


def judge_memory(peaks_mb: Mapping[str, float], host_bytes: int) -> Iterator[Finding]:
    """Compares the peaks of the services with the memory of this host.

    Args:
        peaks_mb: MiB by service.
        host_bytes: of this host, on which the run is assumed to have been.
    """
    total = sum(peaks_mb.values()) * 2**20
    if not peaks_mb or not host_bytes:
        return
    largest = max(peaks_mb, key=lambda name: peaks_mb[name])
    text = f"the services took up to {total / 2**30:.1f} GiB of this host's {host_bytes / 2**30:.1f} GiB"
    if total > _FULL * host_bytes:
        yield warning(
            MEMORY,
            f"{text}, {largest} most ({peaks_mb[largest] / 1024:.1f} GiB)",
            "rollout.replicas lower, buffer.max_bytes lower, or a larger machine; `rollmesh plan --run RUN` shows what "
            "each part takes",
            total_bytes=total,
        )
    else:
        yield ok(MEMORY, text, total_bytes=total)

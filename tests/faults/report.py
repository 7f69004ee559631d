"""Metrics of one run or several, for people and as JSON."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

_OVERLAPPING = "overlapping faults"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over runs; each run as `Outcome.as_json` has it, or already summed."""
    single = [one for run in runs for one in run.get("runs", [run])]
    faults = [fault for run in single for fault in run["faults"]]
    audits = [run["audit"] for run in single if run["audit"]]
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for fault in faults:
        by_kind[_OVERLAPPING if fault["overlapped"] else fault["kind"]].append(fault)
    exits: dict[str, Counter[str]] = defaultdict(Counter)
    for run in single:
        for service, codes in run["exits"].items():
            exits[service].update(codes)
    return {
        "sound": bool(single) and all(run["sound"] for run in single),
        "seeds": [run["seed"] for run in single],
        "minutes": round(sum(run["seconds"] for run in single) / 60, 2),
        "faults": len(faults),
        "lost_groups": sum(audit["lost_groups"] for audit in audits),
        "lost_trajectories": sum(audit["lost_trajectories"] for audit in audits),
        "duplicated": sum(audit["duplicated"] for audit in audits),
        "conserved": len(audits) == len(single) and all(audit["conserved"] for audit in audits),
        "ledger_balanced": sum(run["balanced"] for run in single),
        "rounds": sum(run["rounds"] for run in single),
        "oldest_trained": max((audit["oldest"] for audit in audits), default=0),
        "steps": sum(audit["steps"] for audit in audits),
        "discarded_steps": sum(audit["discarded_steps"] for audit in audits),
        "groups": _added(audit["groups"] for audit in audits),
        "trajectories": _added(audit["trajectories"] for audit in audits),
        "stalls": sum(len(run["stalls"]) for run in single),
        "stalls_by_kind": dict(
            sorted(Counter(" + ".join(s["kinds"]) for run in single for s in run["stalls"]).items())
        ),
        "losses": sum(run["losses"] for run in single),
        "evaluations": sum(run["evaluations"] for run in single),
        "kinds": {kind: _of_kind(found) for kind, found in sorted(by_kind.items())},
        "exits": {service: dict(codes) for service, codes in sorted(exits.items())},
        "problems": [line for run in single for line in _problems(run)],
        "runs": single,
    }


def summary(total: dict[str, Any]) -> str:
    """A merged result in words and tables."""
    lines = [
        f"{total['faults']} faults in {total['minutes']:.1f} minutes (seeds {', '.join(map(str, total['seeds']))}), "
        f"{total['steps']} steps on the surviving lineage, {total['discarded_steps']} undone by takeovers",
        f"lost: {total['lost_groups']} groups, {total['lost_trajectories']} trajectories; "
        f"trained twice: {total['duplicated']}; conserved: {'yes' if total['conserved'] else 'NO'}; "
        f"ledger balanced {total['ledger_balanced']} of {total['rounds']} times; "
        f"oldest token trained: {total['oldest_trained']} versions",
        f"stalls: {total['stalls']}; tails that Redis lost: {total['losses']}; "
        f"evaluations finished: {total['evaluations']}",
        "groups: " + ", ".join(f"{name} {count}" for name, count in total["groups"].items()),
        "trajectories: " + ", ".join(f"{name} {count}" for name, count in total["trajectories"].items()),
        "ends that nobody asked for: " + (", ".join(f"{s} {codes}" for s, codes in total["exits"].items()) or "none"),
        "",
        "| fault | times | with a part of a batch held | next step after, s: p50 | p99 | max "
        "| all well after, s: p50 | p99 | max |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(f"| {kind} | " + " | ".join(map(str, counts.values())) + " |" for kind, counts in total["kinds"].items()),
        *("", *(f"PROBLEM: {line}" for line in total["problems"])),
    ]
    return "\n".join(lines)


def _of_kind(faults: Sequence[dict[str, Any]]) -> dict[str, float]:
    row: dict[str, float] = {"faults": len(faults), "held": sum(fault["held"] > 0 for fault in faults)}
    for name in ("recovery_s", "restored_s"):
        values = [fault[name] for fault in faults]
        for share, label in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            row[f"{name.removesuffix('_s')}_{label}_s"] = round(quantile(values, share), 2)
    return row


def _problems(run: dict[str, Any]) -> list[str]:
    """Violations, one line each, with the seed and the settings that show it."""
    lines = [*run["problems"], *(run["audit"] or {}).get("problems", [])]
    lines += [
        f"stall: {s['what']} for {s['lasted_s']} s after {' + '.join(s['kinds'])} (at {s['at_s']} s, "
        f"ended by {s['ended_by']}): {s['work']}, evaluation {s['evaluation']}; {s['waits']}"
        for s in run["stalls"]
    ]
    settings = " ".join(f"{name}={value}" for name, value in run["settings"].items())
    return [f"seed {run['seed']} ({settings}): {line}" for line in lines]


def _added(parts: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)

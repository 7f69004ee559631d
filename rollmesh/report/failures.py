"""Groups that failed: their number, their reasons, and the most frequent causes.

They are never trained, so that no training step counts their members. Withdrawn groups are none of them: they were not
wanted any more, as at the end of a run that was being evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollmesh.mesh.tables import EVAL, TRAIN

_PREFIX = "failed/"
_WITHDRAWN = f"{_PREFIX}withdrawn"
_KINDS = {TRAIN: "training", EVAL: "evaluation"}
# Characters of a cause that fit into a line.
_CHARACTERS = 200


def failed_groups(reasons: Mapping[str, int]) -> int:
    """Groups that failed, of all ends of groups by `FATE/REASON`."""
    return sum(_failed(reasons).values())


def failures_text(table: str, reasons: Mapping[str, int], causes: Iterable[str] = ()) -> str:
    """The failed groups in words; empty where none has failed.

    Args:
        table: `train` or `eval`.
        reasons: of all ends of groups, by `FATE/REASON`.
        causes: of the latest failures, the most frequent first; none: not known.
    """
    failed = _failed(reasons)
    total = sum(failed.values())
    if not total:
        return ""
    counts = ", ".join(f"{name} {count}" for name, count in sorted(failed.items()))
    cause = next(iter(causes), "")
    cause_text = f"mostly: {_short(cause)}" if cause else "see `rollmesh ledger --failed`"
    return f"{total} {_KINDS[table]} group{'s' * (total > 1)} failed ({counts}); {cause_text}"


def _failed(reasons: Mapping[str, int]) -> dict[str, int]:
    return {
        name.removeprefix(_PREFIX): count
        for name, count in reasons.items()
        if name.startswith(_PREFIX) and name != _WITHDRAWN
    }


def _short(cause: str) -> str:
    return cause if len(cause) <= _CHARACTERS else f"{cause[:_CHARACTERS]} ..."

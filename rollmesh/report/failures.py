"""Groups that failed: how many, for what reasons, and what their members said most often.

They are never trained, so that no training step counts their members.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PREFIX = "failed/"
_KINDS = {"train": "training", "eval": "evaluation"}
# Of a cause, where a line has to hold it.
_CHARACTERS = 200


def failures_text(table: str, reasons: Mapping[str, int], causes: Iterable[str] = ()) -> str:
    """In words; empty where none has failed.

    Args:
        table: `train` or `eval`.
        reasons: of all ends of groups, by `FATE/REASON`.
        causes: of the latest failures, the most frequent first; none: they are not known here.
    """
    failed = {name.removeprefix(_PREFIX): count for name, count in reasons.items() if name.startswith(_PREFIX)}
    total = sum(failed.values())
    if not total:
        return ""
    counts = ", ".join(f"{name} {count}" for name, count in sorted(failed.items()))
    cause = next(iter(causes), "")
    said = f"mostly: {_short(cause)}" if cause else "see `rollmesh ledger --failed`"
    return f"{total} {_KINDS[table]} group{'s' * (total > 1)} failed ({counts}); {said}"


def _short(cause: str) -> str:
    return cause if len(cause) <= _CHARACTERS else f"{cause[:_CHARACTERS]} ..."

"""Notices in the answers of clouds' metadata services, read by pure functions.

Invariant: the time left is never more than what the cloud promises, so a clock that is wrong costs no work.

Sources: AWS "Spot Instance interruption notices", Google Cloud "Spot VMs: preemption process", Azure "Scheduled Events
for Linux VMs".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

# Seconds from a notice to the end, as each cloud promises them.
AWS_S = 120.0
GCP_S = 30.0
AZURE_S = 30.0
# Events of Azure after which the processes of a machine are gone; a freeze leaves them.
_AZURE_ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})


@dataclass(frozen=True, slots=True)
class Notice:
    """The machine ends soon.

    Attributes:
        reason: in words, with the name of who says so.
        within_s: seconds that are left.
    """

    reason: str
    within_s: float


def of_aws(answer: str, now: datetime) -> Notice:
    """A notice of `spot/instance-action`: `{"action": "terminate", "time": "2027-01-31T08:22:00Z"}`.

    Args:
        answer: body of the answer.
        now: by the clock of the metadata service, in UTC.

    Raises:
        ValueError: it is no notice.
    """
    said = _fields(answer)
    action, at = said.get("action"), said.get("time")
    if not isinstance(action, str) or not isinstance(at, str):
        raise ValueError(f"no action and time in {answer[:200]!r}")
    # A machine that hibernates is frozen at once: its processes are not asked first.
    left = 0.0 if action == "hibernate" else _left(datetime.fromisoformat(at), now, AWS_S)
    return Notice(f"AWS will {action} this spot instance", left)


def of_gcp(answer: str) -> Notice | None:
    """The notice in `instance/preempted`: `TRUE` or `FALSE`.

    Raises:
        ValueError: it is neither.
    """
    said = answer.strip().upper()
    if said not in ("TRUE", "FALSE"):
        raise ValueError(f"neither TRUE nor FALSE: {answer[:200]!r}")
    return Notice("Google Cloud preempts this machine", GCP_S) if said == "TRUE" else None


def of_azure(answer: str, name: str, now: datetime) -> Notice | None:
    """The earliest event of `scheduledevents` that ends this machine; None without one.

    Args:
        answer: body of the answer: the events of all machines of a scale set.
        name: this machine's.
        now: by the clock of the metadata service, in UTC.

    Raises:
        ValueError: it is no list of events.
    """
    events = _fields(answer).get("Events")
    if not isinstance(events, list):
        raise ValueError(f"no list of events in {answer[:200]!r}")
    notices = []
    for event in events:
        if event.get("EventType") in _AZURE_ENDS and name in event.get("Resources", ()):
            # Empty once the event has begun.
            at = event.get("NotBefore") or ""
            left = _left(parsedate_to_datetime(at), now, AZURE_S) if at else 0.0
            notices.append(Notice(f"Azure plans {event['EventType']} for this machine", left))
    return min(notices, key=lambda notice: notice.within_s, default=None)


def of_file(text: str, path: str, default_s: float) -> Notice:
    """The notice in a file that exists: the seconds that are left, or nothing for the usual time.

    Raises:
        ValueError: it holds something else.
    """
    said = text.strip()
    within_s = float(said) if said else default_s
    if not 0.0 <= within_s < float("inf"):
        raise ValueError(f"not a number of seconds: {said[:200]!r}")
    return Notice(f"{path} says that this machine ends", within_s)


def _fields(answer: str) -> dict[str, object]:
    said = json.loads(answer)
    if not isinstance(said, dict):
        raise ValueError(f"no JSON object: {answer[:200]!r}")
    return said


def in_utc(at: datetime) -> datetime:
    """A time with its zone; one without is in UTC."""
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _left(at: datetime, now: datetime, most_s: float) -> float:
    """Seconds until a time, at most what was promised."""
    return min(max((in_utc(at) - now).total_seconds(), 0.0), most_s)

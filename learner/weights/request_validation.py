"""Limits of receivers' reports. Reports are stored for each receiver: texts are short, lists have few items."""

from __future__ import annotations

from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.request_fields import ID_CHARACTERS, check_id, check_text
from rollmesh.mesh.text import REPORT_CHARACTERS
from rollmesh.protos import weights_pb2

# Largest bytes and microseconds of a report (a petabyte, decades), so that sums do not overflow.
_LARGEST_NUMBER = 1 << 50
# Addresses that failed a receiver; it comes to the learner after a few.
_MOST_FAILED = 64
_SENTENCES = frozenset({"error", "choice"})


def check_report(report: weights_pb2.SwapReport) -> None:
    """Refuses a report with more content than a receiver can have; removes fields that this release does not know.

    Raises:
        PayloadError: naming the field.
    """
    check_id("member_id", report.member_id)
    for field, value in report.ListFields():
        if field.type == field.TYPE_UINT64 and value > _LARGEST_NUMBER:
            raise PayloadError(field.name, f"{value} is over {_LARGEST_NUMBER}")
        if field.type == field.TYPE_STRING:
            check_text(field.name, value, REPORT_CHARACTERS if field.name in _SENTENCES else ID_CHARACTERS)
    report.DiscardUnknownFields()


def check_watch(request: weights_pb2.WatchRequest) -> None:
    """Refuses a watch without a valid member id; a receiver that reports nothing needs none.

    Raises:
        PayloadError: naming the field.
    """
    if request.member_id:
        check_id("member_id", request.member_id)
    check_text("host_id", request.host_id)


def check_route(request: weights_pb2.RouteRequest) -> None:
    """Refuses a request for a parent that would store, or compare, too much.

    Raises:
        PayloadError: naming the field.
    """
    check_id("member_id", request.member_id)
    check_text("address", request.address)
    if len(request.failed) > _MOST_FAILED:
        raise PayloadError("failed", f"{len(request.failed)} addresses, there may be {_MOST_FAILED}")
    for address in request.failed:
        check_text("failed", address)


def check_broadcast(request: weights_pb2.JoinBroadcastRequest) -> None:
    """Refuses a place in a broadcast without a valid member id.

    Raises:
        PayloadError: naming the field.
    """
    check_id("member_id", request.member_id)
    check_text("transport", request.transport)
    check_text("group", request.group)

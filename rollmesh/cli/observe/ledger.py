"""`rollmesh ledger`: every group recounted, failures with their causes, and prompts of failed groups queued again.

For a run that has ended it shows the last recount, from `summary.json`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmesh.cli.joining import Join
from rollmesh.cli.observe.table_console import table_console
from rollmesh.cli.options import Mesh, OptionalRunFolder, Target, TlsCa, TlsCert, TlsKey, TokenFile, ended_run, target
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.tables import TABLES

if TYPE_CHECKING:
    from rollmesh.launcher.mesh_client import MeshClient
    from rollmesh.protos import buffer_pb2

# All that the buffer keeps.
_FAILED_LIMIT = 1000
_ALL = "all"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("ledger")(_ledger)


def _ledger(
    run: OptionalRunFolder = None,
    mesh: Mesh = None,
    join: Join = None,
    failed: Annotated[bool, typer.Option("--failed", help="List groups that failed, with their causes.")] = False,
    redrive: Annotated[
        list[str] | None,
        typer.Option(
            "--redrive",
            metavar="GROUP",
            help="Queue the prompt of this failed group again, as a new group; `all` for every one. May be repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Recount every group and compare with the counters; exits with 1 if they differ."""
    if not redrive and (ended := ended_run(run, mesh, join)) is not None:
        _show_ended(ended, failed=failed, as_json=as_json)
        return
    where = target(run, mesh, join=join, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    redriven = asyncio.run(_redrive(where, redrive)) if redrive else {}
    answers = asyncio.run(_read(where, _FAILED_LIMIT if failed else 0))
    balanced = not any(answer.discrepancies for answer in answers.values())
    if as_json:
        typer.echo(json.dumps(_as_json(answers, redriven, balanced), indent=1))
    else:
        for table, count in redriven.items():
            typer.echo(f"table {table}: {count} prompt(s) queued again")
        for table, answer in answers.items():
            _print(table, answer, failed=failed)
    if not balanced:
        raise typer.Exit(1)


def _show_ended(run: Path, *, failed: bool, as_json: bool) -> None:
    from rollmesh.report.summary import read_summary

    tables = read_summary(run).ledger
    if not tables:
        raise DataError("the run has ended, and its ledger is not known", hint="the buffer did not answer at the end")
    balanced = not any(table["discrepancies"] for table in tables.values())
    if as_json:
        typer.echo(json.dumps({"balances": balanced, "ended": True, "tables": tables}, indent=1))
    else:
        typer.echo(f"run {run} has ended; at its end:")
        for name, table in tables.items():
            _print_counts(name, {**table["counters"], **dict(sorted(table["reasons"].items()))})
            if failed:
                _print_causes(table["causes"])
            _print_verdict(table["discrepancies"])
    if not balanced:
        raise typer.Exit(1)


async def _read(where: Target, failed_limit: int) -> dict[str, buffer_pb2.LedgerResponse]:
    async with _open(where) as view:
        return {table: await view.ledger(table, failed_limit) for table in TABLES}


async def _redrive(where: Target, groups: Sequence[str]) -> dict[str, int]:
    """Prompts queued again, by table.

    Raises:
        DataError: a group that has not failed, was queued again before, or has no kept prompt.
    """
    queued, unknown = {}, [group for group in groups if group != _ALL and group.partition("-")[0] not in TABLES]
    async with _open(where) as view:
        for table in TABLES:
            asked = [group for group in groups if group.startswith(f"{table}-")]
            if not asked and _ALL not in groups:
                continue
            answer = await view.redrive(table, [] if _ALL in groups else asked)
            queued[table] = answer.redriven
            unknown += answer.unknown
    if unknown:
        raise DataError(
            f"not queued again: {', '.join(unknown)} ({sum(queued.values())} other(s) were)",
            hint="such a group has not failed, was queued again before, or its prompt is no longer kept: "
            "see `rollmesh ledger --failed`",
        )
    return queued


def _open(where: Target) -> MeshClient:
    from rollmesh.launcher.mesh_client import MeshClient

    return MeshClient(where.address, where.security)


def _counts_by_name(counts: buffer_pb2.LedgerCounts) -> dict[str, int]:
    names = [field.name for field in counts.DESCRIPTOR.fields if field.name != "reasons"]
    return {name: getattr(counts, name) for name in names}


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="seconds")


def _as_json(
    answers: Mapping[str, buffer_pb2.LedgerResponse], redriven: Mapping[str, int], balanced: bool
) -> dict[str, Any]:
    tables = {
        table: {
            **_counts_by_name(answer.counters),
            "reasons": dict(answer.counters.reasons),
            "recounted": _counts_by_name(answer.recounted),
            "discrepancies": list(answer.discrepancies),
            "failed_groups": [_failed_group(group) for group in answer.failed],
        }
        for table, answer in answers.items()
    }
    return {"balances": balanced, "redriven": dict(redriven), "tables": tables}


def _failed_group(group: buffer_pb2.FailedGroup) -> dict[str, Any]:
    return {
        "group": group.group_id,
        "task": group.task_id,
        "ordinal": group.ordinal,
        "reason": group.reason,
        "causes": list(group.causes),
        "attempts": group.attempts,
        "failed_at": _time(group.failed_unix_ms),
        "redriven": group.redriven,
    }


def _print(table: str, answer: buffer_pb2.LedgerResponse, *, failed: bool) -> None:
    _print_counts(table, {**_counts_by_name(answer.counters), **dict(sorted(answer.counters.reasons.items()))})
    if answer.failed:
        _print_failed(answer.failed)
    elif failed:
        typer.echo("  no failed groups are kept")
    _print_verdict(answer.discrepancies)


def _print_counts(table: str, counts: Mapping[str, int]) -> None:
    typer.echo(f"table {table}")
    for name, count in counts.items():
        typer.echo(f"  {name:18} {count}")


def _print_causes(causes: Mapping[str, int]) -> None:
    """Prints the causes of the latest failures, the most frequent first."""
    typer.echo("  causes of the latest failures:" if causes else "  no causes of failures are kept")
    for cause, count in causes.items():
        typer.echo(f"    {count} x {cause}")


def _print_verdict(discrepancies: Sequence[str]) -> None:
    for line in discrepancies:
        typer.echo(f"  DIFFERS: {line}")
    typer.echo("  differs" if discrepancies else "  balances")


def _print_failed(failed: Sequence[buffer_pb2.FailedGroup]) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, title="failed groups, the latest first", title_justify="left")
    for name in ("group", "task", "ordinal", "reason", "attempts", "failed at", "causes", "driven again"):
        table.add_column(name, overflow="fold", justify="right" if name in ("ordinal", "attempts") else "left")
    for group in failed:
        table.add_row(
            group.group_id,
            group.task_id,
            str(group.ordinal),
            group.reason,
            str(group.attempts),
            _time(group.failed_unix_ms),
            "\n".join(cause or "(no reason given)" for cause in group.causes),
            "yes" if group.redriven else "no",
        )
    table_console().print(table)

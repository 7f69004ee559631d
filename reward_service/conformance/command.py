"""The kit as a command of its own: `python reward-kit.pyz check grpc://HOST:PORT`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rollmesh.mesh.errors import ConfigError, RollmeshError
from rollmesh.reward_service.conformance.check import check
from rollmesh.reward_service.conformance.findings import Report
from rollmesh.reward_service.conformance.opening import open_transport
from rollmesh.reward_service.conformance.proxy.command import add_options as add_proxy_options
from rollmesh.reward_service.conformance.proxy.command import run as run_proxy
from rollmesh.reward_service.conformance.session import Options
from rollmesh.reward_service.conformance.transport import Transport
from rollmesh.reward_service.samples import builtin_items, items_from_file


async def check_with(transport: Transport, address: str, samples: Path | None, options: Options) -> Report:
    """Checks a server, and closes the transport.

    Raises:
        ConfigError, DataError: as `check` and `items_from_file`.
    """
    try:
        items = builtin_items() if samples is None else items_from_file(samples)
        return await check(address, transport, items, options)
    finally:
        await transport.close()


def shown(report: Report, *, strict: bool, as_json: bool) -> str:
    """The report as text."""
    if as_json:
        return json.dumps(report.as_json(strict=strict), indent=2)
    return "\n".join(report.lines(strict=strict))


def key_of(path: Path | None) -> str:
    """The key in a file; empty without one.

    Raises:
        ConfigError: a file that cannot be read, or is empty.
    """
    if path is None:
        return ""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file {path}: {error}", hint="give the file with the server's key") from error
    if not key:
        raise ConfigError(f"key file {path} is empty", hint="give the file with the server's key")
    return key


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="reward-kit", description="Checks a reward server against its contract.")
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="Check a server.")
    checking.add_argument("endpoint", help="grpc://HOST:PORT, grpcs://, http://HOST:PORT/BASE or https://")
    checking.add_argument("--samples", type=Path, help="JSONL file with rows to try; arithmetic, if left out")
    checking.add_argument("--timeout", type=float, default=10.0, help="seconds each call may take")
    checking.add_argument("--strict", action="store_true", help="warnings fail too")
    checking.add_argument("--json", action="store_true", help="print the report as JSON")
    checking.add_argument("--pack", action="append", default=[], help="golden pack that has to come out right")
    checking.add_argument("--only", action="append", default=[], help="probes to run, by the beginning of their ids")
    checking.add_argument("--restart-command", default="", help="starts the server; it is killed in a call")
    checking.add_argument("--key-file", type=Path, help="file with the server's key")
    checking.add_argument("--tls-ca", type=Path, help="authorities of its certificate, PEM")
    add_proxy_options(commands.add_parser("proxy", help="Forward calls to a server, with faults."))
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "proxy":
            return run_proxy(chosen)
        options = Options(chosen.timeout, chosen.pack, Options.restarting(chosen.restart_command), chosen.only)
        report = asyncio.run(_check(chosen, options))
    except RollmeshError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)  # noqa: T201 - a command
        return error.exit_code
    with suppress(BrokenPipeError):  # The reader has seen enough.
        print(shown(report, strict=chosen.strict, as_json=chosen.json), flush=True)  # noqa: T201 - a command
    return report.exit_code(strict=chosen.strict)


async def _check(chosen: argparse.Namespace, options: Options) -> Report:
    # Channels belong to the event loop in which they are made.
    transport = open_transport(chosen.endpoint, key=key_of(chosen.key_file), ca=chosen.tls_ca)
    return await check_with(transport, chosen.endpoint, chosen.samples, options)

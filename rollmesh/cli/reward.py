"""`rollmesh reward serve|check|proxy`: a reward service, and what looks at one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rollmesh.cli.joining import Join, joined_config
from rollmesh.cli.options import (
    OVERRIDES,
    ConfigPath,
    Host,
    Mesh,
    Port,
    ReadyFile,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    read_config,
    security_of,
)

if TYPE_CHECKING:
    from rollmesh.reward_service.conformance.findings import Report


class _ServeByDefault(TyperGroup):
    """`rollmesh reward cfg.yaml` means `rollmesh reward serve cfg.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["serve", *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    reward = typer.Typer(
        cls=_ServeByDefault, help="Serve or check a reward service, or spoil its answers.", no_args_is_help=True
    )
    reward.command("serve", context_settings=OVERRIDES)(_serve)
    reward.command("check")(_check)
    reward.command("proxy")(_proxy)
    app.add_typer(reward, name="reward")


def _serve(
    context: typer.Context,
    config_path: ConfigPath,
    mesh: Mesh = None,
    join: Join = None,
    host: Host = None,
    port: Port = 0,
    ready_file: ReadyFile = None,
) -> None:
    """Serve the configuration's reward functions; with --mesh or --join, generators find the service by themselves."""
    config, mesh = joined_config(join, mesh, read_config(config_path, context))
    from rollmesh.reward_service.server import service

    status = service.run(config, host=host or config.network.host, port=port, mesh=mesh, ready_file=ready_file)
    raise typer.Exit(status)


def _check(
    endpoint: Annotated[str, typer.Argument(metavar="ADDRESS", help="grpc://HOST:PORT, or http://HOST:PORT/BASE.")],
    samples: Annotated[
        Path | None, typer.Option("--samples", help="Dataset with rows to try; built-in arithmetic, if left out.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds each call may take.")] = 10.0,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    packs: Annotated[
        list[str] | None, typer.Option("--pack", metavar="NAME", help="Golden pack that has to come out right.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PREFIX", help="Probes to run, by the beginning of their ids.")
    ] = None,
    restart_command: Annotated[
        str, typer.Option("--restart-command", help="Starts the server; it is killed in a call, and started again.")
    ] = "",
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File with the key of a server outside of a mesh.")
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Call a reward service with sample items and say what is wrong with its answers."""
    from rollmesh.reward_service.conformance.command import check_with, key_of, shown
    from rollmesh.reward_service.conformance.opening import open_transport
    from rollmesh.reward_service.conformance.session import Options
    from rollmesh.reward_service.member_check import member_transport

    options = Options(timeout_s, packs or (), Options.restarting(restart_command), only or ())
    security = security_of(token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)

    async def check() -> Report:
        if security.token_file or security.tls_cert:
            return await check_with(member_transport(endpoint, security), endpoint, samples, options)
        transport = open_transport(endpoint, key=key_of(key_file), ca=security.tls_ca)
        return await check_with(transport, endpoint, samples, options)

    report = asyncio.run(check())
    typer.echo(shown(report, strict=strict, as_json=as_json))
    raise typer.Exit(report.exit_code(strict=strict))


def _proxy(
    to: Annotated[str, typer.Option("--to", metavar="GRPC://HOST:PORT", help="Reward service to forward calls to.")],
    listen: Annotated[str, typer.Option("--listen", metavar="[HOST:]PORT", help="Where to listen.")] = "127.0.0.1:0",
    delay_s: Annotated[float, typer.Option("--delay", help="Seconds that answers may come later.")] = 0.0,
    error_rate: Annotated[float, typer.Option("--error-rate", help="Share of calls that fail at once.")] = 0.0,
    drop: Annotated[float, typer.Option("--drop", help="Share of calls whose answer never comes.")] = 0.0,
    lose: Annotated[float, typer.Option("--lose", help="Share of results that are missing.")] = 0.0,
    duplicate: Annotated[float, typer.Option("--duplicate", help="Share of calls that are made twice.")] = 0.0,
    reorder: Annotated[bool, typer.Option("--reorder", help="Results come in any order.")] = False,
    cut_after: Annotated[int, typer.Option("--cut-after", help="Calls after which connections are cut.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of all chances.")] = 0,
) -> None:
    """Forward calls to a reward service and spoil some, to see what a run or a server makes of faults."""
    from rollmesh.reward_service.conformance.proxy.command import serve
    from rollmesh.reward_service.conformance.proxy.faults import Faults

    faults = Faults(delay_s, error_rate, drop, lose, duplicate, reorder, cut_after, seed)
    try:
        asyncio.run(serve(to, listen, faults))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None

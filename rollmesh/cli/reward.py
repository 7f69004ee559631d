"""`rollmesh reward serve|check|deliver`: a reward service, what looks at one, what brings it rewards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

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


class _ServeByDefault(TyperGroup):
    """`rollmesh reward cfg.yaml` means `rollmesh reward serve cfg.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["serve", *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    reward = typer.Typer(cls=_ServeByDefault, help="Serve or check a reward service.", no_args_is_help=True)
    reward.command("serve", context_settings=OVERRIDES)(_serve)
    reward.command("check")(_check)
    reward.command("deliver", context_settings={"ignore_unknown_options": True})(_deliver)
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
    endpoint: Annotated[str, typer.Argument(metavar="GRPC://HOST:PORT", help="Reward service to check.")],
    samples: Annotated[
        Path | None, typer.Option("--samples", help="Dataset with rows to try; built-in arithmetic, if left out.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds each call may take.")] = 10.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Call a reward service with sample items and say what is wrong with its answers."""
    from rollmesh.reward_service.check import check_endpoint

    security = security_of(token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    report = asyncio.run(check_endpoint(endpoint, timeout_s=timeout_s, sample_file=samples, security=security))
    for line in report.lines():
        typer.echo(line)
    raise typer.Exit(0 if report.ok else 1)


def _deliver(
    store: Annotated[Path, typer.Argument(help="File of the run's late rewards: reward.late.store.")],
    ticket: Annotated[str, typer.Argument(help="The ticket, as the reward function gave it.")],
    value: Annotated[
        float | None, typer.Argument(help="The reward; left out: the response is unscorable, see --why.")
    ] = None,
    component: Annotated[
        list[str] | None, typer.Option("--component", metavar="NAME=VALUE", help="A named part of it; may be repeated.")
    ] = None,
    why: Annotated[str, typer.Option("--why", help="Reason why there is no reward.")] = "",
) -> None:
    """Deliver a reward that a reward function has promised for later."""
    from rollmesh.mesh.errors import ConfigError
    from rollmesh.reward_service.late import Delivery, deliver

    parts = dict(part.partition("=")[::2] for part in component or ())
    try:
        components = {name: float(number) for name, number in parts.items()}
    except ValueError as error:
        raise ConfigError(f"--component: {error}", hint="write --component NAME=VALUE") from error
    if value is None and not why:
        raise ConfigError("there is no reward to deliver", hint="give a number, or --why for a response without one")
    if not deliver(store.expanduser(), ticket, Delivery(value, components, why)):
        typer.echo(f"{ticket}: a reward was delivered before, which counts")
        raise typer.Exit(1)
    typer.echo(f"{ticket}: delivered")

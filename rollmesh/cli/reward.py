"""`rollmesh reward`: a reward service, what looks at one, and sandboxes."""

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
from rollmesh.mesh.config.scorers.isolation import IsolationSection


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
    reward.command("languages", context_settings=OVERRIDES)(_languages)
    reward.command("sandbox", context_settings=OVERRIDES)(_sandbox)
    app.add_typer(reward, name="reward")


def _serve(
    context: typer.Context,
    config_path: ConfigPath,
    mesh: Mesh = None,
    join: Join = None,
    host: Host = None,
    port: Port = 0,
    http_port: Annotated[
        int | None,
        typer.Option(
            "--http-port", min=0, max=65535, help="Port for callers over HTTP (reward.http.port); 0: a free one."
        ),
    ] = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve the configuration's reward functions; with --mesh or --join, generators find the service by themselves."""
    config, mesh = joined_config(join, mesh, read_config(config_path, context))
    from rollmesh.reward_service.server import service

    if http_port is not None:
        http = config.reward.http.model_copy(update={"port": http_port})
        config = config.model_copy(update={"reward": config.reward.model_copy(update={"http": http})})
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


def _languages(
    context: typer.Context,
    config_path: Annotated[
        Path | None,
        typer.Argument(metavar="CFG.YAML", help="Configuration with `reward.isolation`; the host's own, if left out."),
    ] = None,
) -> None:
    """Say in which languages programs of models can be run here, on which rung, and what the others lack."""
    from rollmesh.reward_service.sandbox.languages.listing import listing

    for line in asyncio.run(listing(_isolation(config_path, context))):
        typer.echo(line)


def _sandbox(
    context: typer.Context,
    key_file: Annotated[Path, typer.Option("--key-file", help="File with the key that callers send.")],
    config_path: Annotated[
        Path | None, typer.Argument(metavar="CFG.YAML", help="Configuration with `reward.isolation`.")
    ] = None,
    host: Annotated[str, typer.Option("--listen", help="Address to bind.")] = "127.0.0.1",
    port: Port = 0,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    ready_file: ReadyFile = None,
) -> None:
    """Run programs of models for reward services of other machines (reward.isolation.plugin: remote)."""
    from rollmesh.reward_service.sandbox.plugins import service

    isolation = _isolation(config_path, context)
    security = security_of(tls_cert=tls_cert, tls_key=tls_key)
    status = service.run(isolation, host=host, port=port, key_file=key_file, security=security, ready_file=ready_file)
    raise typer.Exit(status)


def _isolation(config_path: Path | None, context: typer.Context) -> IsolationSection:
    if config_path is None:
        return IsolationSection()
    return read_config(config_path, context).reward.isolation

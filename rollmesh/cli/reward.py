"""`rollmesh reward serve|check|try|audit`: a reward service, and what looks at rewards."""

from __future__ import annotations

import asyncio
from functools import partial
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
    RunFolder,
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
    reward = typer.Typer(cls=_ServeByDefault, help="Serve a reward service, or look at rewards.", no_args_is_help=True)
    reward.command("serve", context_settings=OVERRIDES)(_serve)
    reward.command("check")(_check)
    reward.command("try", context_settings=OVERRIDES)(_try)
    reward.command("audit")(_audit)
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


Function = Annotated[
    list[str] | None,
    typer.Option("--function", metavar="NAME", help="This function instead of the configuration's. May be repeated."),
]


def _try(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|RUN", help="Rows with `response` or `responses`, as JSONL or Parquet; or a run's samples."
        ),
    ],
    config_path: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="CFG.YAML",
            help="Configuration with the reward, and --section.key=value; that of the run, if left out.",
        ),
    ] = None,
    functions: Function = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="GRPC://HOST:PORT", help="Ask this reward service instead.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option("--key-file", help="File with the key for --endpoint.")] = None,
    step: Annotated[
        list[int] | None, typer.Option("--step", help="Of a run's samples: those of this step. May be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Most responses to try.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score responses of a file, and compare with rewards that were recorded.

    Exits with 1 where a response ends in an error, or has another reward than the recorded one. Ctrl-C prints what is
    there.
    """
    from rollmesh.audit.trial import show_trial, trial_of

    trial = trial_of(source, config_path, context.args, functions or [], endpoint, key_file, steps=step, limit=limit)
    raise typer.Exit(show_trial(trial, typer.echo, partial(typer.echo, err=True), as_json=as_json))


def _audit(
    run: RunFolder,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="FUNCTION|GRPC://HOST:PORT", help="Score the kept samples with this too, and compare."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show what was looked at and is as it should be.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look for signs that the model deceives its reward, in the records and kept samples of a run.

    Exits with 1 where there is a problem; warnings are none.
    """
    from rollmesh.audit.audit import audit_run
    from rollmesh.cli.observe.doctor import show

    show(audit_run(run, against=against), everything=everything, as_json=as_json)

"""`rollmesh reward ...`: a reward service, and commands that look at rewards."""

from __future__ import annotations

import asyncio
from functools import partial
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
    RunFolder,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    read_reward_config,
    security_of,
)
from rollmesh.mesh.config.scorers.isolation import IsolationSection
from rollmesh.mesh.config.variables import key_variable

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
        cls=_ServeByDefault, help="Serve rewards, check a reward service, try and audit rewards.", no_args_is_help=True
    )
    reward.command("serve", context_settings=OVERRIDES)(_serve)
    reward.command("check")(_check)
    reward.command("languages", context_settings=OVERRIDES)(_languages)
    reward.command("sandbox", context_settings=OVERRIDES)(_sandbox)
    reward.command("proxy")(_proxy)
    reward.command("try", context_settings=OVERRIDES)(_try)
    reward.command("audit")(_audit)
    reward.command("deliver", context_settings={"ignore_unknown_options": True})(_deliver)
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
            "--http-port",
            min=0,
            max=65535,
            envvar=key_variable("reward.http.port"),
            help="Port for callers over HTTP (reward.http.port); 0: a free one.",
        ),
    ] = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve the configuration's reward functions; with --mesh or --join, generators find the service by themselves."""
    config, mesh = joined_config(join, mesh, read_reward_config(config_path, context))
    from rollmesh.reward_service.server import service

    if http_port is not None:
        http = config.reward.http.model_copy(update={"port": http_port})
        config = config.model_copy(update={"reward": config.reward.model_copy(update={"http": http})})
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


def _proxy(
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="URL", help="Reward service to forward calls to: grpc://HOST:PORT, http://HOST:PORT/BASE."
        ),
    ],
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
    asyncio.run(serve(to, listen, faults))


def _deliver(
    to: Annotated[
        str,
        typer.Argument(
            metavar="STORE|URL",
            help="The file reward.late.store of this host, or http://HOST:PORT of the service (reward.http.port).",
        ),
    ],
    ticket: Annotated[str, typer.Argument(help="The ticket, as the reward function gave it.")],
    value: Annotated[
        float | None, typer.Argument(help="The reward; left out: the response is unscorable, see --why.")
    ] = None,
    component: Annotated[
        list[str] | None, typer.Option("--component", metavar="NAME=VALUE", help="A named part of it; may be repeated.")
    ] = None,
    why: Annotated[str, typer.Option("--why", help="Reason why there is no reward.")] = "",
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File with the key for a URL (reward.http.key_file).")
    ] = None,
    tls_ca: TlsCa = None,
) -> None:
    """Deliver a reward that a reward function has promised for later."""
    from rollmesh.mesh.errors import ConfigError
    from rollmesh.mesh.private_files import read_secret
    from rollmesh.reward_service.late import Arrival, Delivery, deliver
    from rollmesh.reward_service.late_delivery import deliver_to

    parts = dict(part.partition("=")[::2] for part in component or ())
    try:
        components = {name: float(number) for name, number in parts.items()}
    except ValueError as error:
        raise ConfigError(f"--component: {error}", hint="write --component NAME=VALUE") from error
    if value is None and not why:
        raise ConfigError("there is no reward to deliver", hint="give a number, or --why for a response without one")
    delivery = Delivery(value, components, why)
    if to.startswith(("http://", "https://")):
        key = "" if key_file is None else read_secret(key_file, "--key-file")
        arrival = asyncio.run(deliver_to(to, ticket, delivery, key=key, ca=tls_ca))
    else:
        store = Path(to).expanduser()
        # A mistyped path would make a store that no service reads.
        if not store.is_file():
            raise ConfigError(
                f"there is no store {to}", hint="name the file of reward.late.store; the service makes it"
            )
        arrival = deliver(store, ticket, delivery)
    said = {
        Arrival.DELIVERED: "delivered",
        Arrival.EARLY: "kept, but no response has this ticket yet",
        Arrival.BEFORE: "a reward was delivered before, which counts",
    }
    typer.echo(f"{ticket}: {said[arrival]}")
    raise typer.Exit(int(arrival is Arrival.BEFORE))


def _languages(
    context: typer.Context,
    config_path: Annotated[
        Path | None,
        typer.Argument(metavar="CFG.YAML", help="Configuration with `reward.isolation`; the host's own, if left out."),
    ] = None,
) -> None:
    """Say in which languages programs of models can be run here, on which rung, and what the others lack."""
    from rollmesh.reward_service.sandbox.configured import open_executor
    from rollmesh.reward_service.sandbox.languages.listing import listing

    async def listed(isolation: IsolationSection) -> list[str]:
        executor = await open_executor(isolation)
        try:
            return await listing(executor, isolation.toolchains)
        finally:
            await executor.close()

    for line in asyncio.run(listed(_isolation(config_path, context))):
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
    from rollmesh.reward_service.sandbox import service

    isolation = _isolation(config_path, context)
    security = security_of(tls_cert=tls_cert, tls_key=tls_key)
    status = service.run(isolation, host=host, port=port, key_file=key_file, security=security, ready_file=ready_file)
    raise typer.Exit(status)


def _isolation(config_path: Path | None, context: typer.Context) -> IsolationSection:
    if config_path is None:
        return IsolationSection()
    return read_reward_config(config_path, context).reward.isolation

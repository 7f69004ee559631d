"""`rollmesh buffer|generator|learner|evaluator|role`: one service in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.joining import Join, join_of, joined_config, required
from rollmesh.cli.options import (
    OVERRIDES,
    AllowChanges,
    ConfigPath,
    EndpointKeyFile,
    FromCheckpoint,
    Host,
    LogProbs,
    Mesh,
    MetricsKeyFile,
    Node,
    Notice,
    Port,
    ReadyFile,
    TelemetryKeyFile,
    TlsCa,
    TlsCert,
    TlsClientCa,
    TlsKey,
    TokenFile,
    read_config,
    security_of,
)
from rollmesh.mesh.access.code_permissions import AllowCode, rule_of
from rollmesh.mesh.config.network import NetworkSection
from rollmesh.mesh.config.variables import key_variable, option_variable
from rollmesh.mesh.runtime.ranks import become_ranks, node_of
from rollmesh.mesh.runtime.threads import thread_environment

_LEARNER_MODULES = (
    "rollmesh.learner.service",
    "rollmesh.learner.role_service.service",
    "rollmesh.learner.engines.fsdp2.create",
    "rollmesh.learner.model_files.shared_parts",
)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("buffer", context_settings=OVERRIDES)(_buffer)
    app.command("generator")(_generator)
    app.command("learner", context_settings=OVERRIDES)(_learner)
    app.command("evaluator", context_settings=OVERRIDES)(_evaluator)
    app.command("role", context_settings=OVERRIDES)(_role)


def _buffer(
    context: typer.Context,
    config_path: ConfigPath,
    host: Host = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Default: network.port.")] = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve the buffer: the mesh's one address."""
    config = read_config(config_path, context)
    from rollmesh.buffer.server import process as service

    _end(
        service.run(
            config,
            host=host or config.network.host,
            port=config.network.port if port is None else port,
            ready_file=ready_file,
        )
    )


def _generator(
    mesh: Mesh = None,
    join: Join = None,
    host: Annotated[
        str | None,
        typer.Option("--host", envvar=key_variable("network.host"), help="Address to bind; loopback if left out."),
    ] = None,
    port: Port = 0,
    advertise: Annotated[
        str | None,
        typer.Option(
            "--advertise",
            metavar="HOST[:PORT]",
            envvar=key_variable("network.advertise"),
            help="Host under which others reach it, with the port where a router passes on another one.",
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(
            "--metrics-host", envvar=key_variable("network.metrics_host"), help="Address to which metrics bind."
        ),
    ] = "127.0.0.1",
    metrics_port: Annotated[
        int,
        typer.Option(
            "--metrics-port",
            envvar=key_variable("network.metrics_port"),
            help="Port of the metrics; 0: a free one.",
        ),
    ] = 0,
    member_id: Annotated[
        str | None,
        typer.Option(
            "--member-id",
            envvar=option_variable("member-id"),
            help="Id in the mesh, with a token `generator-...`; new if left out.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, envvar=option_variable("threads"), help="Compute threads.")
    ] = None,
    shares_devices: Annotated[
        bool | None,
        typer.Option(
            "--shares-devices/--own-devices",
            envvar=option_variable("shares-devices"),
            help="Take turns with the learner on the same devices; as placement.mode says if left out.",
        ),
    ] = None,
    drain_s: Annotated[
        float | None,
        typer.Option(
            "--drain",
            min=0.0,
            envvar=option_variable("drain"),
            metavar="SECONDS",
            help="Time that SIGTERM leaves it: running responses continue as long as storing and leaving allow. "
            "If left out, they get 5 s, and storing at most 15 s.",
        ),
    ] = None,
    notice: Notice = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    endpoint_key_file: EndpointKeyFile = None,
    metrics_key_file: MetricsKeyFile = None,
    telemetry_key_file: TelemetryKeyFile = None,
    allow_insecure: Annotated[
        bool,
        typer.Option(
            "--allow-insecure",
            envvar=key_variable("security.allow_insecure"),
            help="As security.allow_insecure: allow listeners that others can reach unprotected.",
        ),
    ] = False,
    allow_code: Annotated[
        AllowCode | None,
        typer.Option(
            "--allow-code",
            envvar=option_variable("allow-code"),
            help="Code of the configuration that it executes: agents, reward functions, interpreters, engine arguments "
            "that may name some. If left out: any for a mesh on loopback, else what --code names.",
        ),
    ] = None,
    code: Annotated[
        list[str] | None,
        typer.Option(
            "--code",
            metavar="NAME",
            envvar=option_variable("code"),
            help="Code that is allowed, as the configuration names it; repeatable.",
        ),
    ] = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve a generator. It needs --join, or --mesh, alone: model, tokenizer and settings come over the mesh.

    The engine too: the run's rollout.engine is hf, vllm or sglang. For vllm, call the rollmesh of vLLM's environment
    (make vllm); for sglang, rollout.sglang names the server or its interpreter: see docs/engines.md.
    """
    if threads is not None:
        # Read by the numerical libraries when they are loaded, which happens below.
        os.environ.update(thread_environment(threads))
    from rollmesh.generators import service
    from rollmesh.generators.drain_times import USUAL, DrainTimes
    from rollmesh.mesh.access.roles import Identity, Role
    from rollmesh.mesh.access.token_file import identity_of
    from rollmesh.mesh.preemption.sources import source_of
    from rollmesh.mesh.rpc.failover_channel import is_local

    security = security_of(
        token_file=token_file,
        endpoint_key_file=endpoint_key_file,
        metrics_key_file=metrics_key_file,
        telemetry_key_file=telemetry_key_file,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        allow_insecure=allow_insecure,
    )
    node = join_of(join, mesh, security)
    if node is not None:
        mesh, security = node.mesh, node.security
        host, advertise = host or node.host, advertise or node.advertise
    mesh = required(mesh)
    _end(
        service.run(
            mesh,
            service.GeneratorOptions(
                identity=Identity(Role.GENERATOR, member_id) if member_id else identity_of(security, Role.GENERATOR),
                security=security,
                code=rule_of(allow_code, code or (), is_local=is_local(mesh)),
                host=host or NetworkSection().host,
                port=port,
                advertise=advertise,
                metrics_host=metrics_host,
                metrics_port=metrics_port,
                threads=threads,
                ready_file=ready_file,
                shares_devices=shares_devices,
                drain=USUAL if drain_s is None else DrainTimes.within(drain_s),
                preemption=source_of(notice) if notice is not None else None,
            ),
        )
    )


def _learner(
    context: typer.Context,
    config_path: ConfigPath,
    mesh: Mesh = None,
    join: Join = None,
    takeover: Annotated[
        bool,
        typer.Option(
            "--takeover",
            envvar=option_variable("takeover"),
            help="Take the run over even if its learner's lease has not ended.",
        ),
    ] = False,
    allow_changes: AllowChanges = False,
    from_checkpoint: FromCheckpoint = None,
    node: Node = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            envvar=option_variable("once"),
            help="Do not continue a run that is finished: answer health checks until asked to end. For platforms that "
            "start again whatever ends, as a StatefulSet of Kubernetes does.",
        ),
    ] = False,
    port: Port = 0,
    notice: Notice = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve the learner: all of its ranks, or those of one node; where a starter has set RANK, that one."""
    config, finished = read_config(config_path, context), None
    required(mesh or join)
    if once:
        from rollmesh.learner import standby

        finished = standby.how_finished(config.run.folder)
    if not finished:
        become_ranks(config.learner.ranks, node_of(config.learner.distributed, node), _LEARNER_MODULES)
    # Each rank has files of its own.
    config, mesh = joined_config(join, mesh, config)
    mesh = required(mesh)
    if finished:
        _end(standby.run(config, finished, port=port, ready_file=ready_file))
    from rollmesh.checkpoint_choice import checkpoint_path
    from rollmesh.learner import service
    from rollmesh.mesh.preemption.sources import source_of

    start = checkpoint_path(config.run.folder, from_checkpoint) if from_checkpoint is not None else None
    _end(
        service.run(
            config,
            mesh,
            takeover=takeover,
            allow_changes=allow_changes,
            start_from=start,
            port=port,
            preemption=source_of(notice) if notice is not None else None,
            ready_file=ready_file,
        )
    )


def _evaluator(
    context: typer.Context,
    config_path: ConfigPath,
    mesh: Mesh = None,
    join: Join = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            envvar=option_variable("weights"),
            help="A checkpoint or an adapter's folder; those of model.path, if left out.",
        ),
    ] = None,
    log_probs: LogProbs = False,
    port: Port = 0,
    ready_file: ReadyFile = None,
) -> None:
    """Serve a stored model in the learner's place, and ask it the prompts of data.eval (see rollmesh eval)."""
    config, mesh = joined_config(join, mesh, read_config(config_path, context))
    from rollmesh.learner.standalone import service

    mesh = required(mesh)
    _end(service.run(config, mesh, weights=weights, with_log_probs=log_probs, port=port, ready_file=ready_file))


def _role(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Role of the algorithm: critic, reference, teacher ...")],
    config_path: ConfigPath,
    mesh: Mesh = None,
    join: Join = None,
    host: Host = None,
    port: Port = 0,
    ready_file: ReadyFile = None,
) -> None:
    """Serve the model of one role of the algorithm, in processes of its own; the learner finds it in the mesh."""
    config = read_config(config_path, context)
    required(mesh or join)
    become_ranks(config.learner.ranks_of(name), modules=_LEARNER_MODULES)
    config, mesh = joined_config(join, mesh, config)
    mesh = required(mesh)
    from rollmesh.learner.role_service import service

    _end(service.run(config, name, mesh, host=host, port=port, ready_file=ready_file))


def _end(status: int) -> None:
    """Ends the command with a service's exit status."""
    raise typer.Exit(status)

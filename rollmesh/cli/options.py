"""Options and arguments that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from rollmesh.cli.joining import by_variables_alone, join_of
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.load import load_reward_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.variables import key_variable, option_variable, overrides_from
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.runtime.fork_server.client import ForkServer

# For commands with unknown options that are `--section.key=value` overrides.
OVERRIDES: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

ConfigPath = Annotated[
    Path,
    typer.Argument(
        metavar="CFG.YAML",
        help="Configuration; change keys with --section.key=VALUE, --section.key VALUE or section.key=VALUE.",
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, for example runs/NAME.")]
OptionalRunFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", help="Run folder; if left out, the latest one below runs/, preferably one in progress."
    ),
]
_MESH_HELP = (
    "Address of the mesh: that of its buffer. With several fronts, one or more of them (A:1,B:2); it names the others."
)
Mesh = Annotated[
    str | None,
    typer.Option("--mesh", metavar="HOST:PORT,...", envvar=option_variable("mesh"), help=_MESH_HELP),
]
AllowChanges = Annotated[
    bool,
    typer.Option(
        "--allow-changes",
        envvar=option_variable("allow-changes"),
        help="Continue the run even with another model or other data than it began with.",
    ),
]
FromCheckpoint = Annotated[
    str | None,
    typer.Option(
        "--from-checkpoint",
        metavar="NAME",
        envvar=option_variable("from-checkpoint"),
        help="Continue from this checkpoint (a name in RUN/checkpoints, or `best`); later steps are undone.",
    ),
]
LogProbs = Annotated[
    bool,
    typer.Option(
        "--log-probs",
        envvar=option_variable("log-probs"),
        help="Store token ids and log-probs of the responses too.",
    ),
]
Node = Annotated[
    int | None,
    typer.Option(
        "--node",
        min=0,
        envvar=option_variable("node"),
        help="Number of this machine among learner.distributed.nodes; SLURM_NODEID if left out.",
    ),
]
Host = Annotated[str | None, typer.Option("--host", help="Address to bind to; network.host if left out.")]
Port = Annotated[
    int,
    typer.Option(
        "--port", min=0, max=65535, envvar=option_variable("port"), help="Port to bind to; 0 picks a free one."
    ),
]
ReadyFile = Annotated[
    Path | None,
    typer.Option(
        "--ready-file",
        envvar=option_variable("ready-file"),
        help="File to write, as JSON, once the service is healthy.",
    ),
]
Notice = Annotated[
    str | None,
    typer.Option(
        "--notice",
        envvar=option_variable("notice"),
        metavar="SOURCE",
        help="Where it is said that this machine is about to be taken away (spot instances): aws, gcp or azure for the "
        "metadata service of that cloud, or file:PATH. The service then ends in order within the time that is left.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=key_variable("security.token_file"),
        help="File with the mesh's token, or a grant of it (rollmesh token).",
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar=key_variable("security.tls_ca"), help="PEM certificate authority to trust."),
]
TlsCert = Annotated[
    Path | None,
    typer.Option("--tls-cert", envvar=key_variable("security.tls_cert"), help="PEM certificate to show to others."),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", envvar=key_variable("security.tls_key"), help="PEM key of --tls-cert.")
]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-ca",
        envvar=key_variable("security.tls_client_ca"),
        help="PEM certificate authority of the certificates that callers must show.",
    ),
]
EndpointKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--endpoint-key-file",
        envvar=key_variable("security.endpoint_key_file"),
        help="File with the API key of the HTTP endpoint.",
    ),
]
MetricsKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--metrics-key-file",
        envvar=key_variable("security.metrics_key_file"),
        help="File with the key of the metrics, a bearer token.",
    ),
]
TelemetryKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--telemetry-key-file",
        envvar=key_variable("security.telemetry_key_file"),
        help="File with the key of the collector of traces, a bearer token.",
    ),
]


def fork_server_of(context: typer.Context) -> ForkServer | None:
    """The server from which this command may fork services, if it has one."""
    return context.obj if isinstance(context.obj, ForkServer) else None


def read_config(path: Path, context: typer.Context) -> Config:
    """The configuration with the overrides that environment variables hold, and then the command line."""
    return load_config(path, [*overrides_from(os.environ), *context.args])


def read_reward_config(path: Path, context: typer.Context) -> Config:
    """`read_config` for a command that only scores."""
    return load_reward_config(path, [*overrides_from(os.environ), *context.args])


def security_of(**given: Any) -> SecuritySection:
    """The `security` section from the options of tokens and TLS.

    Raises:
        ConfigError: they contradict one another.
    """
    try:
        return SecuritySection(**given)
    except ValidationError as error:
        raise ConfigError(
            "; ".join(str(found["msg"]).removeprefix("Value error, ") for found in error.errors())
        ) from error


def ended_run(run: Path | None, mesh: str | None, join: str | None = None) -> Path | None:
    """The folder of the named run where it has ended and left a summary; else None. Trainings on data are left out."""
    from rollmesh.launcher import folder
    from rollmesh.run_files import SUMMARY, trained_by

    if (mesh or join) and (run is None or not by_variables_alone(mesh, join)):
        return None
    if run is None:
        if any(Path("runs").glob(f"*/{folder.MESH}")):
            return None
        found = (path for path in Path("runs").glob(f"*/{SUMMARY}") if trained_by(path.parent) is None)
        ended = sorted(found, key=lambda path: path.stat().st_mtime)
        return ended[-1].parent if ended else None
    if trained_by(run) is not None:
        return None
    return run if (run / SUMMARY).exists() and not (run / folder.MESH).exists() else None


def target(run: Path | None, mesh: str | None, *, join: str | None = None, **given: Path | None) -> Target:
    """The mesh to talk to: from the options, or from the run folder. A named folder goes before variables.

    Args:
        join: value of `--join`.
        given: options of `security`; they take precedence over the run folder and the join string.

    Raises:
        ConfigError: the options contradict one another.
        UnauthenticatedError: the mesh is not the join string's.
        UnreachableError: it does not answer, so that its certificate authority is not known.
        DataError: neither is given and no run is in progress below `runs/`.
    """
    from rollmesh.launcher import folder
    from rollmesh.run_files import is_in_use, read_launch

    if run is not None and by_variables_alone(mesh, join):
        mesh = join = None
    if (node := join_of(join, mesh, security_of(**given), retry_s=0.0)) is not None:
        return Target(node.mesh, node.security)
    if mesh is not None:
        return Target(mesh, security_of(**given))
    if run is None:
        begun = list(Path("runs").glob(f"*/{folder.MESH}"))
        if not begun:
            raise DataError("no run is in progress below runs/", hint="give a run folder, or --mesh or --join")
        run = max(begun, key=lambda path: (is_in_use(path.parent), path.stat().st_mtime)).parent
    named = {name: path for name, path in given.items() if path is not None}
    return Target(folder.read_mesh(run), security_of(**{**dict(read_launch(run).security), **named}), run)


class Target:
    """A mesh to talk to, and the folder of its run where that is known."""

    def __init__(self, address: str, security: SecuritySection, folder: Path | None = None) -> None:
        self.address = address
        self.security = security
        self.folder = folder

"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, DataError

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
Mesh = Annotated[str | None, typer.Option("--mesh", metavar="HOST:PORT,...", help=_MESH_HELP)]
RequiredMesh = Annotated[str, typer.Option("--mesh", metavar="HOST:PORT,...", help=_MESH_HELP)]
AllowChanges = Annotated[
    bool,
    typer.Option("--allow-changes", help="Continue the run even with another model or other data than it began with."),
]
FromCheckpoint = Annotated[
    str | None,
    typer.Option(
        "--from-checkpoint",
        metavar="NAME",
        help="Continue from this checkpoint (a name in RUN/checkpoints, or `best`); later steps are undone.",
    ),
]
LogProbs = Annotated[bool, typer.Option("--log-probs", help="Store token ids and log-probs of the responses too.")]
ReadyFile = Annotated[
    Path | None, typer.Option("--ready-file", help="File to write, as JSON, once the service is healthy.")
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the mesh's token, or a grant of it (rollmesh token).")
]
TlsCa = Annotated[Path | None, typer.Option("--tls-ca", help="PEM certificate authority to trust.")]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", help="PEM certificate to show to others.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="PEM key of --tls-cert.")]
TlsClientCa = Annotated[
    Path | None,
    typer.Option("--tls-client-ca", help="PEM certificate authority of the certificates that callers must show."),
]
EndpointKeyFile = Annotated[
    Path | None, typer.Option("--endpoint-key-file", help="File with the API key of the HTTP endpoint.")
]
MetricsKeyFile = Annotated[
    Path | None, typer.Option("--metrics-key-file", help="File with the key of the metrics, a bearer token.")
]


def read_config(path: Path, context: typer.Context) -> Config:
    """The configuration with the overrides that the command line holds."""
    return load_config(path, context.args)


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


def ended_run(run: Path | None, mesh: str | None) -> Path | None:
    """The folder of the named run where it has ended and left a summary; else None. Trainings on data are left out."""
    from rollmesh.launcher import folder
    from rollmesh.run_files import trained_by

    if mesh is not None:
        return None
    if run is None:
        if any(Path("runs").glob(f"*/{folder.MESH}")):
            return None
        found = (path for path in Path("runs").glob(f"*/{folder.SUMMARY}") if trained_by(path.parent) is None)
        ended = sorted(found, key=lambda path: path.stat().st_mtime)
        return ended[-1].parent if ended else None
    if trained_by(run) is not None:
        return None
    return run if (run / folder.SUMMARY).exists() and not (run / folder.MESH).exists() else None


def target(run: Path | None, mesh: str | None, **given: Path | None) -> Target:
    """The mesh to talk to: from the options, or from the run folder.

    Args:
        given: options of `security`; they take precedence over the run folder.

    Raises:
        ConfigError: the options contradict one another.
        DataError: neither is given and no run is in progress below `runs/`.
    """
    from rollmesh.launcher import folder
    from rollmesh.run_files import read_launch

    if mesh is not None:
        return Target(mesh, security_of(**given))
    if run is None:
        begun = list(Path("runs").glob(f"*/{folder.MESH}"))
        if not begun:
            raise DataError("no run is in progress below runs/", hint="give a run folder, or --mesh host:port")
        run = max(begun, key=lambda path: (folder.is_in_use(path.parent), path.stat().st_mtime)).parent
    named = {name: path for name, path in given.items() if path is not None}
    return Target(folder.read_mesh(run), security_of(**{**dict(read_launch(run).security), **named}), run)


class Target:
    """A mesh to talk to, and the folder of its run where that is known."""

    def __init__(self, address: str, security: SecuritySection, folder: Path | None = None) -> None:
        self.address = address
        self.security = security
        self.folder = folder

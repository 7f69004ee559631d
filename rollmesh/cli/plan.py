"""`rollmesh plan`: the memory of a run, before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.options import OVERRIDES, ConfigPath, read_config
from rollmesh.mesh.errors import ConfigError

_DEVICES_HELP = (
    "Devices of a node, COUNTxNAME: 8xH100-80G, 8xH200-141G, 4xA100-40G, 4xA100-80G, 2xL40S-48G, 1x4090-24G, "
    "8xB200-180G, 1xCPU-64G. A name that is not known needs its GB: 8xMINE-96G."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plan", context_settings=OVERRIDES)(_plan)


def _plan(
    context: typer.Context,
    config_path: ConfigPath,
    devices: Annotated[str, typer.Option("--devices", metavar="COUNTxNAME", help=_DEVICES_HELP)],
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Number of nodes, each with these devices.")] = 1,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="Memory of a node (1T, 512G); if left out: this machine's if the devices are here, else assumed.",
        ),
    ] = None,
    shm: Annotated[
        str | None,
        typer.Option("--shm", metavar="SIZE", help="Size of a node's /dev/shm; if left out: as for the memory."),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Also follow a step on fake tensors with torch's memory tracker (a minute)."),
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN", help="Also compare with the memory that this run took, from its folder."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, in bytes, as one JSON object.")] = False,
) -> None:
    """Say how much memory a run needs on which devices, what does not fit, and which keys would make it fit.

    Nothing is started and no weights are read: model.path may be a folder with a config.json alone. Exits with 2 where
    something does not fit.
    """
    config = read_config(config_path, context)
    from rollmesh.planning.cluster import parse_devices
    from rollmesh.planning.command import plan_run
    from rollmesh.planning.report import lines, to_json

    found = plan_run(config, parse_devices(devices, nodes, host_memory, shm), trace=trace, run=run)
    if as_json:
        typer.echo(json.dumps(to_json(found), indent=2))
    else:
        for line in lines(found):
            typer.echo(line)
    if not found.plan.fits:
        raise typer.Exit(ConfigError.exit_code)

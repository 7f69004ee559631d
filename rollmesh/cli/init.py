"""`rollmesh init`: a commented configuration to begin with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("init")(_init)


def _init(
    model: Annotated[
        str | None, typer.Option("--model", metavar="PATH|ID", help="Model: a Hugging Face folder, or a hub id.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="FILE", help="Rows to train on: Parquet, JSONL, a folder, a hub id.")
    ] = None,
    held_out: Annotated[str | None, typer.Option("--eval", metavar="FILE", help="Held-out rows.")] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="NAME",
            help="Scorer by name, or FILE.py:FUNCTION; may be given several times. If left out, one that fits.",
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the run.")] = "first",
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="YAML", help="Configuration of verl, or arguments of TRL's GRPOConfig as YAML."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="CFG.YAML", help="File to write; it must not be there yet.")] = (
        Path("cfg.yaml")
    ),
) -> None:
    """Write a configuration for your model, your data and this machine, with a comment at every setting.

    It looks at the model's folder, at the first rows and at the devices. At a terminal it asks for what is missing.
    With --from it takes over what a configuration of verl or TRL says, and notes what it does not.
    """
    from rollmesh.initialization.command import Request, configuration, write_new
    from rollmesh.initialization.proposal import Wishes
    from rollmesh.mesh.errors import ConfigError

    if out.exists():
        raise ConfigError(f"{out} is there already", hint="choose another --out, or remove it")
    if source is None and sys.stdin.isatty():
        model = model or typer.prompt("model (a Hugging Face folder, or a hub id)")
        data = data or typer.prompt("training rows (Parquet or JSONL file, folder, or hub id)")
    request = Request(model, data, Wishes(name, held_out, tuple(reward or ())), source)
    text, notes = configuration(request)
    write_new(out, text)
    if notes:
        typer.echo(f"{notes} notes at the end of {out} say what was not taken over")
    typer.echo(f"{out} is written; read it, then:")
    typer.echo(f"  rollmesh run {out} --dry-run    checks everything, starts nothing")
    typer.echo(f"  rollmesh run {out}              trains")

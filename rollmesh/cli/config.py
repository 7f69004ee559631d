"""`rollmesh config show|schema|explain|algorithms`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollmesh.cli.options import OVERRIDES, ConfigPath, read_config
from rollmesh.mesh.config import yaml_text
from rollmesh.mesh.config.base import Section
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(
        help="The configuration: its resolved values, its keys, and the values derived from them.", no_args_is_help=True
    )
    group.command("show", context_settings=OVERRIDES)(_show)
    group.command("schema")(_schema)
    group.command("explain", context_settings=OVERRIDES)(_explain)
    group.command("algorithms")(_algorithms)
    app.add_typer(group, name="config")


def _show(context: typer.Context, config_path: ConfigPath) -> None:
    """Print the configuration with all defaults and overrides, as YAML."""
    config = read_config(config_path, context)
    typer.echo(yaml_text.write(config.model_dump(mode="json")), nl=False)


def _schema(
    command: Annotated[
        str, typer.Argument(metavar="[COMMAND]", help="Of `sft`, `rm` or `dpo`; those of a run if left out.")
    ] = "",
    as_json: bool = typer.Option(False, "--json", help="Print the JSON schema instead."),
) -> None:
    """Print every key with its meaning and default."""
    from rollmesh.mesh.config.trainers.configs import CONFIGS

    model: type[Section] | None = CONFIGS.get(command) if command else Config
    if model is None:
        raise ConfigError(f"no command {command!r} has a configuration of its own", hint=f"known: {', '.join(CONFIGS)}")
    if as_json:
        typer.echo(json.dumps(model.model_json_schema(), indent=2))
        return
    from rollmesh.cli.explanations.schema import key_lines

    for line in key_lines(model):
        typer.echo(line)


def _explain(context: typer.Context, config_path: ConfigPath) -> None:
    """Print what follows from the configuration: sizes, deadlines, threads, and all settings of the algorithm."""
    config = read_config(config_path, context)
    from rollmesh.cli.explanations.algorithms import explain_algorithm
    from rollmesh.cli.explanations.explain import explain
    from rollmesh.learner.start_requirements import check_device, check_start

    check_start(config, elsewhere=config.learner.python is not None)
    if config.learner.device == "cpu":
        # Others are those of the run's machine, which may be another one.
        check_device(config, "cpu")
    for line in (*explain(config), *explain_algorithm(config)):
        typer.echo(line)


def _algorithms() -> None:
    """Print every algorithm that `algorithm: NAME` may name."""
    from rollmesh.cli.explanations.algorithms import list_algorithms

    for line in list_algorithms():
        typer.echo(line)

"""`rollmesh sft`, `rollmesh rm` and `rollmesh dpo`: training on data that are there, on this machine or several."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rollmesh.cli.options import OVERRIDES, ConfigPath, Node
from rollmesh.mesh.config.variables import overrides_from

_TRAINER_MODULE = "rollmesh.learner.trainers.process"
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start the run over; its former folder is kept under another name.")
]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("sft", context_settings=OVERRIDES)(_sft)
    app.command("rm", context_settings=OVERRIDES)(_rm)
    app.command("dpo", context_settings=OVERRIDES)(_dpo)


def _sft(context: typer.Context, config_path: ConfigPath, fresh: Fresh = False, node: Node = None) -> None:
    """Fine-tune a model on conversations or responses. A run continues in its folder.

    It leaves the model in RUN/hf/last. `rollmesh config schema sft` lists the keys; docs/trainers.md has the rows.
    """
    _train("sft", context, config_path, node, fresh=fresh)


def _rm(context: typer.Context, config_path: ConfigPath, fresh: Fresh = False, node: Node = None) -> None:
    """Train a reward model on pairs of a chosen and a rejected response. A run continues in its folder.

    It leaves a sequence classifier with one score in RUN/hf/last. `rollmesh config schema rm` lists the keys.
    """
    _train("rm", context, config_path, node, fresh=fresh)


def _dpo(context: typer.Context, config_path: ConfigPath, fresh: Fresh = False, node: Node = None) -> None:
    """Optimize a model by preferences: DPO, IPO or KTO. A run continues in its folder.

    It leaves the model in RUN/hf/last. `rollmesh config schema dpo` lists the keys; docs/trainers.md has the rows.
    """
    _train("dpo", context, config_path, node, fresh=fresh)


def _train(command: str, context: typer.Context, config_path: ConfigPath, node: int | None, *, fresh: bool) -> None:
    from rollmesh.mesh.runtime.ranks import become_ranks, node_of
    from rollmesh.trainers import read_trainer_config, run_here

    config = read_trainer_config(command, config_path, [*overrides_from(os.environ), *context.args])
    become_ranks(config.learner.ranks, node_of(config.learner.distributed, node), (_TRAINER_MODULE,))
    raise typer.Exit(run_here(command, config, fresh=fresh))

"""`rollmesh run`: the whole mesh on this machine."""

from __future__ import annotations

import typer

from rollmesh.cli.options import OVERRIDES, ConfigPath, read_config


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("run", context_settings=OVERRIDES)(_run)


def _run(context: typer.Context, config_path: ConfigPath) -> None:
    """Run the whole mesh here: buffer, reward service, generators, learner. The same run folder goes on.

    Generators decode with --rollout.engine=hf, vllm or sglang. The latter two have environments of their own
    (make vllm, make sglang), which --rollout.python and --rollout.sglang.python name: see docs/engines.md.
    """
    config = read_config(config_path, context)
    from rollmesh.launcher.local import run_locally

    raise typer.Exit(run_locally(config))

"""`rollmesh run`: the whole mesh on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from rollmesh.cli.options import OVERRIDES, AllowChanges, ConfigPath, FromCheckpoint, fork_server_of, read_config


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("run", context_settings=OVERRIDES)(_run)


def _run(
    context: typer.Context,
    config_path: ConfigPath,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start the run over; its former folder is kept under another name.")
    ] = False,
    allow_changes: AllowChanges = False,
    from_checkpoint: FromCheckpoint = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Check all that a start checks, say what would start, and end.")
    ] = False,
) -> None:
    """Run the whole mesh here: buffer, reward service, generators, learner. A run continues in its folder.

    Generators decode with --rollout.engine=hf, vllm or sglang. The latter two have environments of their own
    (make vllm, make sglang), which --rollout.python and --rollout.sglang.python name: see docs/engines.md.
    """
    config = read_config(config_path, context)
    if (fork_server := fork_server_of(context)) is not None:
        fork_server.load()
    if dry:
        from rollmesh.launcher.preflight.dry_run import dry_run

        for line in dry_run(config, fresh=fresh, allow_changes=allow_changes, fork_server=fork_server):
            typer.echo(line)
        return
    from rollmesh.launcher.local import run_locally

    changes = {"fresh": fresh, "allow_changes": allow_changes}
    raise typer.Exit(run_locally(config, **changes, from_checkpoint=from_checkpoint, fork_server=fork_server))

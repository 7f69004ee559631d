"""The command tree, and the form of errors at the terminal.

Invariant: an expected failure (`RollmeshError`) is one line `error: ...`, a hint where there is one, and the error's
exit code. A traceback is shown only with `--debug`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from rollmesh.cli import (
    certificates,
    config,
    data,
    evaluation,
    init,
    plan,
    replay,
    reward,
    run,
    services,
    token,
    trainers,
)
from rollmesh.cli.command_list import CommandList
from rollmesh.cli.observe import dashboard, doctor, ledger, results, status, turns, weights
from rollmesh.cli.override_forms import accept_overrides
from rollmesh.launcher.console.output import BufferedOutput
from rollmesh.launcher.errors import ServiceExitError
from rollmesh.launcher.preloaded import PRELOADED_MODULES
from rollmesh.mesh.config.variables import check_variables
from rollmesh.mesh.errors import PERMANENT, RollmeshError
from rollmesh.mesh.private_files import keep_private
from rollmesh.mesh.runtime.bounded_exit import bound_exit
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.runtime.memory_tuning import collect_garbage_seldom
from rollmesh.mesh.runtime.ranks import started_here


class _App(typer.Typer):
    """Builds its tree of commands once. That takes a tenth of a second, which forked services find done."""

    @cached_property
    def tree(self) -> Any:
        """The commands."""
        return typer.main.get_command(self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.tree(*args, **options)


app = _App(
    name="rollmesh",
    cls=CommandList,
    help="Asynchronous reinforcement learning for language models as a mesh of small services.",
    epilog=(
        "Generators decode with one of three engines, rollout.engine: hf, vllm or sglang; docs/engines.md says what "
        "each needs. With --debug, anywhere in the command, an error shows its traceback."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
init.register(app)
run.register(app)
trainers.register(app)
services.register(app)
reward.register(app)
status.register(app)
dashboard.register(app)
doctor.register(app)
turns.register(app)
plan.register(app)
ledger.register(app)
replay.register(app)
weights.register(app)
results.register(app)
evaluation.register(app)
config.register(app)
data.register(app)
token.register(app)
certificates.register(app)
accept_overrides(app)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rollmesh {metadata.version('rollmesh')}")
        raise typer.Exit


@app.callback()
def _rollmesh(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that need no command."""


# The exit code of a service after an error that a restart would not fix. Some supervisors, Docker's among them, only
# know "restart on failure": 0 keeps them from trying for ever.
PERMANENT_CODE_VARIABLE = "ROLLMESH_PERMANENT_EXIT_CODE"
_SERVICES = ("buffer", "reward", "generator", "learner", "evaluator")
_LAUNCHERS = ("run", "eval", "generate")
_TRAINERS = ("sft", "rm", "dpo")
# Longest exit of a learner that has closed everything; trackers may send their last records meanwhile.
_EXIT_S = 60.0
# Only these commands write files for other users: all else that a command or its children make is private.
_FOR_OTHERS = ("export", "data", "init")


def main() -> None:
    """Entry point of the `rollmesh` command; ends the process."""
    collect_garbage_seldom()
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    if _command(arguments) not in _FOR_OTHERS:
        keep_private()
    # Before anything starts a thread. It loads what services share once the configuration is read.
    forks = _command(arguments) in _LAUNCHERS and _without_options(sys.orig_argv)
    fork_server = ForkServer.fork_here(PRELOADED_MODULES) if forks else None
    try:
        check_variables(os.environ)
        with fork_server or nullcontext():
            app(args=[item for item in arguments if item != "--debug"], prog_name="rollmesh", obj=fork_server)
    except RollmeshError as error:
        if debug:
            raise
        # The exit code must be this one, whether or not anyone reads.
        shown = BufferedOutput(sys.stderr)
        shown.write(f"error: {error.message}\n")
        if error.hint:
            shown.write(f"hint: {error.hint}\n")
        shown.close()
        raise SystemExit(_exit_code(_status(error), arguments)) from error
    except SystemExit as end:
        raise SystemExit(_exit_code(end.code, arguments)) from None
    except Exception:
        _exit_code(1, arguments)
        raise


def _without_options(command: Sequence[str]) -> bool:
    """Whether `rollmesh` was started without options of the interpreter, which services would inherit by a fork."""
    program, *rest = command[1:] or [""]
    if program == "-P":  # services have it too
        program, *rest = rest or [""]
    return Path(program).name == "rollmesh" or (program == "-m" and rest[:1] in (["rollmesh"], ["rollmesh.cli"]))


def _status(error: RollmeshError) -> int:
    """The error's exit code; for a service that ended the run, the service's own."""
    if isinstance(error, ServiceExitError) and error.status > 0:
        return error.status
    return error.exit_code


def _exit_code(code: str | int | None, arguments: Sequence[str]) -> str | int | None:
    """The code as a supervisor should see it; a learner has to exit in time while its threads wait for a disk."""
    code = _for_supervisor(code, arguments)
    if _command(arguments) in ("learner", *_TRAINERS):
        bound_exit(code if isinstance(code, int) else int(code is not None), _EXIT_S)
    return code


def _for_supervisor(code: str | int | None, arguments: Sequence[str]) -> str | int | None:
    permanent_code = os.environ.get(PERMANENT_CODE_VARIABLE, "")
    # Where a service has several ranks, the process that has started them reports the code.
    if code in PERMANENT and _command(arguments) in _SERVICES and permanent_code.isdecimal() and not started_here():
        return int(permanent_code)
    return code


def _command(arguments: Sequence[str]) -> str:
    return next((item for item in arguments if item != "--debug"), "")

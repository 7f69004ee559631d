"""`rollmesh eval`, `rollmesh generate`, `rollmesh compare`: stored models measured, asked and compared."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.options import OVERRIDES, LogProbs, fork_server_of

if TYPE_CHECKING:
    from rollmesh.evaluation.local import LocalEvaluation

_Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A Hugging Face folder or hub id, a run's folder (its best checkpoint, or the latest), a checkpoint's "
        "folder, or an adapter's folder as peft writes it; model.path, if left out.",
    ),
]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Start it over; its former folder is kept under another name.")]
_OptionalConfig = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CFG.YAML]", help="Configuration of a run, for prompts, rewards and generators; --a.b=v changes keys."
    ),
]
# The shell's own code for a command that SIGINT has ended.
_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("eval", context_settings=OVERRIDES)(_eval)
    app.command("generate", context_settings=OVERRIDES)(_generate)
    app.command("compare")(_compare)


def _eval(
    context: typer.Context,
    config_path: _OptionalConfig = None,
    model: _Model = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the results; eval-MODEL below run.dir, if left out.")
    ] = None,
    fresh: _Fresh = False,
    log_probs: LogProbs = False,
) -> None:
    """Evaluate a model on data.eval: mean@n, pass@k, maj@n, best@n with confidence intervals, in all and by source.

    --eval.n=8 --eval.temperature=1 asks for eight responses to each prompt. The same command continues an evaluation
    that was interrupted.
    """
    config_path, overrides = _split(config_path, context.args)
    from rollmesh.evaluation.evaluate import Evaluation, EvaluationRequest
    from rollmesh.evaluation.settings import read_for_evaluation
    from rollmesh.evaluation.tables import summary_lines
    from rollmesh.launcher.console.plain import PlainView

    config = read_for_evaluation(config_path, overrides, {}, model)
    if (fork_server := fork_server_of(context)) is not None:
        fork_server.load()
    evaluation = Evaluation(EvaluationRequest(config, model, out, fresh=fresh, with_log_probs=log_probs))
    view = PlainView(1)
    try:
        summary = evaluation.run(view, _execute, fork_server)
    finally:
        view.close()
    for line in summary_lines(summary):
        typer.echo(line)


def _generate(
    context: typer.Context,
    config_path: _OptionalConfig = None,
    model: _Model = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt; may be repeated.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="JSON lines, each a text or an object with `prompt`; or a text file with a prompt on each line; "
            "- reads JSON lines from stdin.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Texts are a user's messages: the model's chat template applies.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder that keeps the responses, so that the command can be continued."),
    ] = None,
    fresh: _Fresh = False,
    log_probs: LogProbs = False,
) -> None:
    """Ask a model prompts, and print its responses as JSON lines in their order. Nothing is rewarded.

    --eval.n=4 --eval.temperature=1 asks for four responses to each; --rollout.max_response_tokens limits them.
    Events go to stderr.
    """
    config_path, overrides = _split(config_path, context.args)
    from rollmesh.evaluation.generate import GenerationRequest, generate
    from rollmesh.launcher.console.plain import PlainView

    request = GenerationRequest(config_path, overrides, model, out, chat=chat, fresh=fresh, with_log_probs=log_probs)
    # A copy: while the services run, the file of stderr is the launcher's log.
    fork_server = fork_server_of(context)
    with os.fdopen(os.dup(sys.stderr.fileno()), "w") as stderr:
        view = PlainView(1, stderr)
        try:
            for line in generate(request, prompt or [], prompts, view, _execute, fork_server):
                typer.echo(line)
        finally:
            view.close()


def _compare(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="A B ...",
            help="Folders of `rollmesh eval`, or runs: RUN stands for its best evaluation, RUN@[I:]V for another one.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare models and runs with the first: paired differences over the same prompts, and outcomes of runs.

    Values that were measured with other data or other rewards are refused.
    """
    from rollmesh.evaluation.compared import compare_all

    comparison = compare_all(given)
    if as_json:
        typer.echo(json.dumps(comparison.to_json(), indent=1))
        return
    from rollmesh.evaluation.tables import all_lines

    for line in all_lines(comparison):
        typer.echo(line)


def _execute(launch: LocalEvaluation) -> None:
    asyncio.run(launch.run(handle_signals=True))
    if launch.interrupted:
        raise typer.Exit(_INTERRUPTED)


def _split(config_path: Path | None, arguments: list[str]) -> tuple[Path | None, list[str]]:
    """An override that stands where the configuration may be left out is one all the same."""
    if config_path is not None and str(config_path).startswith("--"):
        return None, [str(config_path), *arguments]
    return config_path, arguments

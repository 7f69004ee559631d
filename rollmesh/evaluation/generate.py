"""Responses of a model to a user's prompts: an evaluation without rewards."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rollmesh.evaluation.evaluate import Evaluation, EvaluationRequest
from rollmesh.evaluation.local import LocalEvaluation
from rollmesh.evaluation.prompts import Prompt, parse_prompts, read_prompts, write_prompts
from rollmesh.evaluation.settings import WITHOUT_REWARDS, read_for_evaluation
from rollmesh.evaluation.summary import PromptRecord
from rollmesh.launcher.console.view import View
from rollmesh.mesh.runtime.fork_server.client import ForkServer

_STDIN = Path("-")
_KEY = "prompt"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Responses that a user asks for.

    Attributes:
        config_path: YAML file of a run, for the generators; None: defaults.
        overrides: as on the command line.
        model, out, fresh, with_log_probs: see `EvaluationRequest`; without `out` nothing is kept.
        chat: texts are a user's messages.
    """

    config_path: Path | None
    overrides: Sequence[str]
    model: str | None = None
    out: Path | None = None
    chat: bool = False
    fresh: bool = False
    with_log_probs: bool = False


def generate(
    request: GenerationRequest,
    texts: Sequence[str],
    file: Path | None,
    view: View,
    execute: Callable[[LocalEvaluation], None],
    fork_server: ForkServer | None = None,
) -> Iterator[str]:
    """The responses as JSON lines, in the order of the prompts: texts first, then those of the file.

    Args:
        request: see there.
        texts: prompts.
        file: further ones; `-` is stdin.
        view: shows events.
        execute: runs the services to their end.
        fork_server: see `Evaluation.run`.

    Raises:
        RollmeshError: prompts or model cannot be used, or what ended the generation early.
    """
    with ExitStack() as closers:
        scratch = Path(closers.enter_context(tempfile.TemporaryDirectory(prefix="rollmesh-")))
        # Outside the folder of the responses, which may be set aside once everything is checked.
        path = write_prompts([*texts, *_read(file)], scratch / "prompts", chat=request.chat)
        given = {**WITHOUT_REWARDS, "data.eval": str(path), "data.prompt_key": _KEY}
        config = read_for_evaluation(request.config_path, request.overrides, given, request.model)
        if fork_server is not None:
            fork_server.load()
        evaluation = Evaluation(
            EvaluationRequest(
                config,
                request.model,
                request.out or scratch / "run",
                fresh=request.fresh,
                with_log_probs=request.with_log_probs,
            )
        )
        evaluation.run(view, execute, fork_server)
        yield from map(_line, evaluation.records())


def _read(file: Path | None) -> list[Prompt]:
    if file is None:
        return []
    return parse_prompts(sys.stdin.read(), "stdin", _KEY) if file == _STDIN else read_prompts(file, _KEY)


def _line(record: PromptRecord) -> str:
    """A prompt and its responses, without what concerns rewards."""
    kept = {key: value for key, value in record.items() if key not in ("data_source", "ground_truth", "responses")}
    responses = []
    for response in record["responses"]:
        unjudged = {key: value for key, value in response.items() if key not in ("reward", "reason")}
        responses.append({**unjudged, "error": response["reason"]} if response["reason"] else unjudged)
    return json.dumps({**kept, "responses": responses}, ensure_ascii=False)

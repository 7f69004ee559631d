"""A model is evaluated from start to end: choice, checks, the pass over its prompts, the summary."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollmesh.evaluation.identity import claim_folder, identity_of
from rollmesh.evaluation.local import LocalEvaluation
from rollmesh.evaluation.model_choice import ModelChoice, choose_model
from rollmesh.evaluation.settings import evaluation_config
from rollmesh.evaluation.summary import EvaluationSummary, PromptRecord, summarize_records
from rollmesh.launcher import folder as folders
from rollmesh.launcher.console.view import View
from rollmesh.launcher.preflight.checks import check_evaluation, check_files
from rollmesh.learner.evaluation.asked_rows import asked_rows
from rollmesh.learner.standalone.response_file import RESPONSES, read_responses
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import write_atomically
from rollmesh.mesh.runtime.fork_server.client import ForkServer

EVALUATION = "evaluation.json"
"""The summary, in the folder of an evaluation."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """An evaluation that a user asks for.

    Attributes:
        config: prompts, rewards, generators (`read_for_evaluation`).
        model: see `choose_model`.
        out: folder of the results; None: `eval-MODEL` below `run.dir`.
        fresh: start it over; the folder that it has is kept under another name.
        with_log_probs: store token ids and log-probs of the responses too.
        rewards: what the responses are judged by (`reward_measurement`), where the calling process serves functions;
            None: what the configuration says.
    """

    config: Config
    model: str | None = None
    out: Path | None = None
    fresh: bool = False
    with_log_probs: bool = False
    rewards: Mapping[str, Any] | None = None


class Evaluation:
    """An evaluation that can be run; making it checks it.

    Args:
        request: see there.

    Attributes:
        config: of its services.
        folder: of its results.

    Raises:
        RollmeshError: its model, prompts or rewards cannot be used.
    """

    def __init__(self, request: EvaluationRequest) -> None:
        choice = _with_local_base(choose_model(request.config, request.model))
        out = request.out or request.config.run.dir / f"eval-{_NOT_IN_NAMES.sub('-', choice.name)}"
        self.config = config = evaluation_config(request.config, choice, out)
        self.folder = config.run.folder
        check_files(config)
        self._choice = choice
        self._with_log_probs = request.with_log_probs
        self._rewards = request.rewards or {}
        self._asked = frozenset(_asked_rows(config))
        if request.fresh:
            folders.set_aside(self.folder, time.strftime("%Y%m%d-%H%M%S"))

    def run(
        self, view: View, execute: Callable[[LocalEvaluation], None], fork_server: ForkServer | None = None
    ) -> EvaluationSummary:
        """Asks the prompts that have no responses yet, and summarizes all.

        Args:
            view: shows events.
            execute: runs the services to their end.
            fork_server: forks trials and services if that is possible; None: all are executed.

        Raises:
            RollmeshError: what ended it early; the responses so far stay.
        """
        identity = identity_of(self.config, self._choice, with_log_probs=self._with_log_probs, rewards=self._rewards)
        claim_folder(self.folder, identity)
        if len(self.records()) < len(self._asked):
            prepared = check_evaluation(self.config, fork_server)
            launch = LocalEvaluation(
                self.config,
                self._choice,
                view,
                prepared,
                asked=len(self._asked),
                with_log_probs=self._with_log_probs,
                fork_server=fork_server,
            )
            execute(launch)
        return self._summarize()

    def records(self) -> list[PromptRecord]:
        """The prompts that have responses, in the order of the file."""
        found = (record for record in read_responses(self.folder / RESPONSES) if record["row"] in self._asked)
        return sorted(found, key=lambda record: int(record["row"]))

    def _summarize(self) -> EvaluationSummary:
        summary = summarize_records(
            self.records(),
            name=self._choice.name,
            folder=str(self.folder),
            asked=len(self._asked),
            n=self.config.eval.n,
            right_at=self.config.eval.right_at,
        )
        try:
            write_atomically(self.folder / EVALUATION, json.dumps(summary.to_json(), indent=1) + "\n")
        except OSError as error:
            raise DataError(f"cannot write the summary in {self.folder}: {error.strerror or error}") from error
        return summary


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary in the folder of an evaluation.

    Raises:
        DataError: it has none.
    """
    try:
        return dict(json.loads((folder / EVALUATION).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{folder} has no summary of an evaluation: {error}", hint="run `rollmesh eval` to its end"
        ) from None


def _with_local_base(choice: ModelChoice) -> ModelChoice:
    if Path(choice.base.path).is_dir():
        return choice
    # Loads transformers.
    from rollmesh.learner.model_files.location import resolve_model

    return replace(choice, base=resolve_model(choice.base))


def _asked_rows(config: Config) -> list[int]:
    from rollmesh.learner.data.dataset import open_source

    assert config.data.eval is not None, "it was checked when the configuration was read"
    sizes = [len(open_source(source, config.data.prompt_key)) for source in config.data.eval]
    return asked_rows(sizes, config.eval.rows)

"""The head of the page: what is trained, how far it is, and its key values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmesh.dashboard.documents.responses import interval_text
from rollmesh.dashboard.run_view import EVALUATION, RunView
from rollmesh.learner.checkpoint.best import best_checkpoint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.mesh.errors import DataError
from rollmesh.report.metrics import REWARD
from rollmesh.run_files import RUN
from rollmesh.training.summary import HELD_OUT, LOSS

# Last steps from which the time that is left follows.
_RECENT = 50
# Last steps whose mean is the training reward: one batch is too noisy.
_LAST = 20
# Metrics of an evaluation among the key values.
_MOST_METRICS = 3


def head_document(view: RunView) -> dict[str, Any]:
    """Name, state, facts, progress and key values; unknown ones are left out."""
    return {
        "name": view.name,
        "command": view.command,
        "state": _state(view),
        "facts": [{"name": name, "text": text} for name, text in _facts(view) if text],
        "progress": _progress(view) if view.evaluation is None else None,
        "values": [
            {"name": name, "value": value, "form": form, "note": note}
            for name, value, form, note in _values(view)
            if value is not None and math.isfinite(value)
        ],
        "checkpoints": _checkpoints(view.folder),
    }


def _values(view: RunView) -> Iterator[tuple[str, float | None, str, str]]:
    """Name, value, form and note of the key values."""
    if view.evaluation is not None:
        return _evaluation_values(view.evaluation)
    return _run_values(view) if view.command == RUN else _training_values(view)


def _state(view: RunView) -> dict[str, str]:
    """`kind` is `running`, `finished`, `stopped` or `failed`."""
    if view.evaluation is not None:
        if view.evaluation["complete"]:
            return {"kind": "finished", "text": "every prompt has responses"}
        return {"kind": "stopped", "text": "some prompts have no response: the same command asks them again"}
    if view.mesh is not None and view.mesh.trouble:
        return {"kind": "failed", "text": view.mesh.trouble}
    if view.in_progress:
        finished = view.mesh is not None and view.mesh.run_finished
        return {"kind": "running", "text": "finishing" if finished else "in progress"}
    ended = view.summary.ended if view.summary is not None else ""
    if not ended:
        return {"kind": "stopped", "text": "ended without a summary"}
    kind = {"finished": "finished", "interrupted": "stopped", "killed": "stopped"}.get(ended, "failed")
    return {"kind": kind, "text": ended}


def _facts(view: RunView) -> Iterator[tuple[str, str]]:
    config = view.config
    if config is not None:
        yield "model", str(config.model.path)
    if view.run_config is not None:
        yield "algorithm", view.run_config.algorithm.name
    elif config is not None or view.command == EVALUATION:
        yield "command", f"rollmesh {view.command}"
    if config is not None:
        yield "data", _names(config.data.train)
        yield "held out", _names(config.data.eval)
    if view.run_config is not None:
        rollout = view.run_config.rollout
        yield "generators", f"{rollout.engine}, {rollout.n} responses to a prompt"
    if view.folder is not None:
        yield "folder", str(view.folder)


def _names(paths: object) -> str:
    """Paths of a setting in words: one, a list, or with weights."""
    if paths is None:
        return ""
    if isinstance(paths, dict):
        return ", ".join(map(str, paths))
    if isinstance(paths, list | tuple):
        return ", ".join(_names(getattr(path, "path", path)) for path in paths)
    return str(getattr(paths, "path", paths))


def _progress(view: RunView) -> dict[str, Any]:
    """Steps so far and of the whole run, beginning, seconds that are left, and why it ended early; null: not known."""
    steps = view.steps
    done = int(steps.last("step") or 0)
    planned = view.run_config.learner.steps if view.run_config is not None else int(steps.last("steps") or 0) or None
    time = steps.column("time")
    left_s = None
    recent = time[-_RECENT:]
    if view.in_progress and planned and len(recent) > 1:
        left_s = round(max(0, planned - done) * float(recent[-1] - recent[0]) / (len(recent) - 1))
    return {
        "done": done,
        "planned": planned,
        "began": round(view.start, 3) if view.start else None,
        "last": round(float(time[-1]), 3) if len(time) else None,
        "left_s": left_s,
        "ended_early": view.run_summary.ended_early if view.run_summary is not None else "",
    }


def _run_values(view: RunView) -> Iterator[tuple[str, float | None, str, str]]:
    steps = view.steps
    first, last = view.first_last("eval/reward")
    yield "held-out reward", last, "3", f"from {first:.3f}" if first is not None else ""
    recent = steps.column(REWARD)[-_LAST:]
    yield "training reward", float(recent.mean()) if len(recent) else None, "3", f"mean of {len(recent)} steps"
    bound = view.run_config.buffer.max_staleness if view.run_config is not None else None
    note = "" if bound is None else f"versions, at most {bound}"
    yield "staleness", steps.last("staleness/mean"), "2", note
    yield "effective sample size", steps.last("rollout_corr/ratio/ess"), "%", "of the last batch"
    generated, trained = view.tokens_per_s()
    yield "tokens/s trained", trained, "int", "" if generated is None else f"{generated:,.0f} generated"


def _evaluation_values(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, float | None, str, str]]:
    for name, found in list(evaluation["metrics"].items())[:_MOST_METRICS]:
        yield name, found["value"], "3", interval_text(found)
    prompts = evaluation["prompts"]
    yield "prompts answered", prompts["answered"], "int", f"of {prompts['asked']}"
    yield "response length", evaluation["response_tokens"], "2", "tokens on average"
    yield "responses without a score", evaluation["unscored"] or None, "int", "in no metric"


def _training_values(view: RunView) -> Iterator[tuple[str, float | None, str, str]]:
    first, last = view.first_last(HELD_OUT)
    yield "held-out loss", last, "4", f"from {first:.4f}" if first is not None else ""
    losses = view.steps.column(LOSS)
    yield "loss", view.steps.last(LOSS), "4", f"from {losses[0]:.4f}" if len(losses) else ""
    yield "epochs", view.steps.last("epoch"), "2", ""
    yield "pairs in the right order", view.steps.last("rewards/accuracies"), "%", "of the last batch"
    yield "tokens/s trained", view.steps.last("tokens_per_second"), "int", "last step"


def _checkpoints(folder: Path | None) -> dict[str, str]:
    """Paths of the last and of the best checkpoint, relative to the run folder."""
    if folder is None:
        return {}
    root = folder / CHECKPOINTS_NAME
    found = {}
    try:
        if (best := best_checkpoint(root)) is not None:
            found["best"] = f"{CHECKPOINTS_NAME}/{best.checkpoint}"
    except DataError:
        # The file is about a checkpoint of a newer program, or being repaired: the page shows the rest.
        pass
    if checkpoints := list_checkpoints(root):
        found["latest"] = f"{CHECKPOINTS_NAME}/{checkpoints[-1][1].name}"
    return found

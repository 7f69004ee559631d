"""A tiny model that chats, rows about sums, and trainings of both in this process."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

from examples.chats import chat_tokenizer
from examples.demo import model as demo_model
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.trainers.process import train_rank
from rollmesh.trainers import read_trainer_config

ROWS = 24


def write_chat_model(folder: Path) -> Path:
    """Writes the model; each test trains it from here. Checkpoints take most of that time: it has one layer."""
    with patch.object(demo_model, "_LAYERS", 1):
        demo_model.write_model(folder, 0, chat_tokenizer(string.digits + "+="))
    return folder


def write_rows(folder: Path) -> dict[str, Path]:
    """Writes rows for each kind of training; gives their files."""
    made: dict[str, list[dict[str, Any]]] = {"sft": [], "rm": [], "kto": []}
    for index in range(ROWS):
        left, right = divmod(index * 7, 10)
        prompt = [{"role": "user", "content": f"{left}+{right}="}]
        good, bad = ([{"role": "assistant", "content": str(left + right + off)}] for off in (0, 1 + index % 3))
        made["sft"].append({"messages": [*prompt, *good]})
        made["rm"].append({"prompt": prompt, "chosen": good, "rejected": bad})
        made["kto"].append({"prompt": prompt, "completion": (good, bad)[index % 2], "label": index % 2 == 0})
    files = {}
    for name, rows in made.items():
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files | {"dpo": files["rm"]}


def train(
    command: str,
    model: Path,
    rows: Path,
    run: Path,
    *,
    stop_after: int | None = None,
    stop_prepared: int | None = None,
    **keys: Any,
) -> bool:
    """Trains in this process; False: stopped.

    Args:
        command: `sft`, `rm` or `dpo`.
        model, rows: to train, and on what.
        run: folder of the run.
        stop_after: steps after which an end is asked for.
        stop_prepared: pieces of the preparation after which it is asked for.
        keys: further keys of the configuration, with `__` for points.
    """
    values = {
        "run.name": run.name,
        "run.dir": run.parent,
        "model.path": model,
        "data.train": rows,
        "learner.steps": 4,
        "learner.optimizer.lr": 1e-3,
        "learner.batch.rows": 10,
        **{name.replace("__", "."): value for name, value in keys.items()},
    }
    overrides = [f"{name}={value}" for name, value in values.items()]
    return train_rank(command, read_trainer_config(command, {}, overrides), Stops(stop_after, stop_prepared))


class Stops(ControlRequests):
    """Asks for the end at a step, or while the training is prepared.

    The preparation looks whether it is asked for before each of its pieces. The loop looks once in each step, and for
    requests of checkpoints after that.
    """

    def __init__(self, steps: int | None, pieces: int | None = None) -> None:
        super().__init__()
        self._steps_left, self._pieces_left = steps, pieces

    @property
    def stop_reason(self) -> str | None:
        if self._pieces_left is not None:
            self._pieces_left -= 1
            return "SIGTERM" if self._pieces_left < 0 else None
        return "SIGTERM" if self._steps_left is not None and self._steps_left <= 1 else None

    def pop_checkpoint_requests(self) -> list[Future[tuple[Path, int]]]:
        if self._steps_left is not None:
            self._steps_left -= 1
        return super().pop_checkpoint_requests()


def metrics(run: Path) -> list[Mapping[str, Any]]:
    """The records of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

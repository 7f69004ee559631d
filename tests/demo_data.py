"""The demonstration's data with a tiny model, prepared once for all processes of the suite."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from examples.demo.prepare import prepare

# A preparation takes seconds, on a busy machine minutes.
_DEADLINE_S = 600.0
_WARM_STEPS = 20


def shared_folder(factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder of all processes of the suite."""
    base = factory.getbasetemp()
    return base if worker_id == "master" else base.parent


def prepared(shared: Path, warm_steps: int = _WARM_STEPS) -> Path:
    """The folder of the problems and of a model that was supervised for so many steps, made by the first to ask."""
    folder = shared / f"demo-{warm_steps}"
    with FileLock(f"{folder}.lock", timeout=_DEADLINE_S):
        prepare(folder, task="arithmetic", seed=0, largest_digit=4, held_out=32, warm_steps=warm_steps)
    return folder

"""Data of the demonstration, prepared once, and runs that always end."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.demo_data import prepared, shared_folder
from tests.integration import wheel
from tests.integration.mesh import DEADLINE_S, MeshRun


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    return shared_folder(tmp_path_factory, worker_id)


@pytest.fixture(scope="session")
def built(shared: Path) -> Path:
    """The wheel of this tree; its sdist lies beside it. Built by the first process that wants it."""
    folder = shared / "packages"
    with FileLock(f"{folder}.lock", timeout=DEADLINE_S):
        return next(folder.glob("*.whl"), None) or wheel.build(folder)


@pytest.fixture(scope="session")
def demo_data(shared: Path) -> Path:
    """A tiny model without much of a warm start, and its problems."""
    return prepared(shared)


@pytest.fixture(scope="session")
def warm_data(shared: Path) -> Path:
    """A model that gets a fifth of the problems right."""
    return prepared(shared, 120)


@pytest.fixture
def start_mesh(demo_data: Path, tmp_path: Path) -> Iterator[Callable[..., MeshRun]]:
    """Starts runs, all in the same run folder; ends what a failed test leaves."""
    started: list[MeshRun] = []

    def start(*overrides: str, **kwargs: object) -> MeshRun:
        started.append(MeshRun(demo_data, tmp_path, *overrides, **kwargs))  # type: ignore[arg-type]  # env and cwd
        return started[-1]

    yield start
    for run in started:
        run.close()

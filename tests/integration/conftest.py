"""Data of the demonstration, prepared once, and runs that always end."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from examples.demo.prepare import prepare
from tests.integration import wheel
from tests.integration.mesh import DEADLINE_S, MeshRun

Prepare = Callable[[int], Path]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder of all processes of the suite."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def built(shared: Path) -> Path:
    """The wheel of this tree; its sdist lies beside it. Built by the first process that wants it."""
    folder = shared / "packages"
    with FileLock(f"{folder}.lock", timeout=DEADLINE_S):
        return next(folder.glob("*.whl"), None) or wheel.build(folder)


@pytest.fixture(scope="session")
def prepared(shared: Path) -> Prepare:
    """The demonstration's problems and a model that was supervised for so many steps; all processes share them."""

    def folder_of(warm_steps: int) -> Path:
        folder = shared / f"demo-{warm_steps}"
        with FileLock(f"{folder}.lock", timeout=DEADLINE_S):
            prepare(folder, task="arithmetic", seed=0, largest_digit=4, held_out=32, warm_steps=warm_steps)
        return folder

    return folder_of


@pytest.fixture(scope="session")
def demo_data(prepared: Prepare) -> Path:
    """A tiny model without much of a warm start, and its problems."""
    return prepared(2)


@pytest.fixture(scope="session")
def warm_data(prepared: Prepare) -> Path:
    """A model that gets a fifth of the problems right."""
    return prepared(120)


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

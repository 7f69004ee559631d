"""Data of the demonstration, prepared once, and runs that always end."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.demo.prepare import prepare
from tests.integration.mesh import MeshRun


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without much of a warm start, and its problems."""
    folder = tmp_path_factory.mktemp("demo-data")
    prepare(folder, task="arithmetic", seed=0, largest_digit=4, held_out=32, warm_steps=2)
    return folder


@pytest.fixture(scope="session")
def warm_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gets a fifth of the problems right."""
    folder = tmp_path_factory.mktemp("warm-data")
    prepare(folder, task="arithmetic", seed=0, largest_digit=4, held_out=32, warm_steps=120)
    return folder


@pytest.fixture
def start_mesh(demo_data: Path, tmp_path: Path) -> Iterator[Callable[..., MeshRun]]:
    """Starts runs, all in the same run folder; ends what a failed test leaves."""
    started: list[MeshRun] = []

    def start(*overrides: str, **kwargs: object) -> MeshRun:
        started.append(MeshRun(demo_data, tmp_path, *overrides, **kwargs))  # type: ignore[arg-type]  # env only
        return started[-1]

    yield start
    for run in started:
        run.close()

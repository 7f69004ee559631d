"""The engines' contract as a plugin of pytest: its fixtures.

A package's `conftest.py` names this module in its `pytest_plugins`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollmesh.testing.engine_cases import ARCHITECTURES, make_model
from rollmesh.testing.worlds import EngineLayout, EngineWorld, Processes

GetWorld = Callable[[EngineLayout], EngineWorld]


@pytest.fixture(scope="session")
def engine_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders of tiny models by architecture."""
    folder = tmp_path_factory.mktemp("engine-models")
    return {name: make_model(folder / name, name) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def engine_worlds() -> Iterator[GetWorld]:
    """The world of a layout. Layouts of as many processes share them, for all tests."""
    started: dict[int, Processes] = {}
    with ExitStack() as closers:

        def get(layout: EngineLayout) -> EngineWorld:
            if layout.processes not in started:
                started[layout.processes] = Processes(layout.processes)
                closers.callback(started[layout.processes].close)
            return EngineWorld(layout, started[layout.processes])

        yield get


@pytest.fixture
def world(request: pytest.FixtureRequest, engine_worlds: GetWorld) -> EngineWorld:
    """The world of the layout that is the test's parameter."""
    return engine_worlds(request.param)

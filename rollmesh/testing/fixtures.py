"""The engines' contract as a plugin of pytest: its fixtures.

The topmost `conftest.py` of a package's tests names this module in its `pytest_plugins`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

# Before they are imported, below and by tests: then a failed assert shows what it compares, as in a test's own module.
_ASSERTING = [
    f"rollmesh.testing.{name}"
    for name in ("contract_inference", "contract_memory", "contract_state", "contract_training", "engine_cases")
]
pytest.register_assert_rewrite(*(name for name in _ASSERTING if name not in sys.modules))

from rollmesh.testing.engine_cases import ARCHITECTURES, make_model  # noqa: E402 - see above
from rollmesh.testing.worlds import EngineLayout, EngineWorld, Processes  # noqa: E402 - see above

STARTED = pytest.StashKey[dict[int, Processes]]()
"""Processes of worlds by their number. Those that were ended are started again for the next test."""
GetWorld = Callable[[EngineLayout], EngineWorld]


@pytest.fixture(scope="session")
def engine_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders of tiny models by architecture."""
    folder = tmp_path_factory.mktemp("engine-models")
    return {name: make_model(folder / name, name) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def engine_worlds(pytestconfig: pytest.Config) -> Iterator[GetWorld]:
    """The world of a layout. Layouts of as many processes share them, for all tests."""
    started = pytestconfig.stash.setdefault(STARTED, {})
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

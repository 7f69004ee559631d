"""Services for the launcher's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollmesh.launcher.supervisor import Observer, Supervisor
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.testing.fixtures import engine_worlds  # noqa: F401 - fixture
from tests.fork_server import environment, take_environment
from tests.rollmesh.fake_spec import LOADED


class Recorder:
    """Keeps what the launcher reports."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tails: dict[str, list[str]] = {}

    def observer(self) -> Observer:
        return Observer(event=self.events.append, tail=lambda service, lines: self.tails.update({service: list(lines)}))

    def starts_of(self, name: str) -> int:
        return sum(event.startswith((f"{name} is up", f"{name} is back")) for event in self.events)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="session")
def forking() -> Iterator[ForkServer]:
    """Forks services of `fake_service.py`."""
    started = ForkServer.spawn(LOADED, environment())
    assert started is not None
    with started:
        yield started


@pytest.fixture
def make_supervisor(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, forking: ForkServer
) -> Callable[..., Supervisor]:
    """Its services are forked."""

    def make(
        max_restarts: int = 3, frozen_after_s: float = 0.0, fork_server: ForkServer | None = forking
    ) -> Supervisor:
        take_environment(monkeypatch)
        return Supervisor(
            tmp_path,
            security=SecuritySection(),
            max_restarts=max_restarts,
            frozen_after_s=frozen_after_s,
            observer=recorder.observer(),
            fork_server=fork_server,
        )

    return make

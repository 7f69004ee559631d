"""Processes of the benchmarks, forked from one that has imported what they need."""

from __future__ import annotations

import multiprocessing

import pytest

from rollmesh.testing.worlds import IMPORTED_ONCE

_IMPORTED = (
    "benchmarks.buffer.front",
    "benchmarks.buffer.load_processes",
    "benchmarks.fleet.generator_process",
    "benchmarks.fleet.learner_process",
)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks spawn their processes, so that none has another's memory. A test measures nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED_ONCE, *_IMPORTED])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: {"spawn": context}[method])

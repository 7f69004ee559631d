"""Any order of calls: what every engine promises holds at the end, whatever was asked of it in between."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.types import GenerationRequest, KvPolicy, PartialResponse, SleepLevel, WakeStep
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.engines.external.driven_harness import RestartingHarness, ScriptedHarness
from tests.generators.engines.harness import constant_prefix, joined, request

_OLD = PolicyVersion(1, 0)
_FIRST_TOKEN = 20
_CALLS = ["submit", "submit", "abort", "update", "call_off", "pause", "resume", "sleep", "wake", "progress", "probe"]


@dataclass
class _Walk:
    """An engine, and what was asked of it."""

    harness: ScriptedHarness
    asked: dict[str, GenerationRequest] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    swaps: list[Future[Any]] = field(default_factory=list)
    others: list[Future[Any]] = field(default_factory=list)
    parts: list[Future[list[PartialResponse]]] = field(default_factory=list)
    version: int = 0

    def step(self, call: str, value: int) -> None:
        engine = self.harness.engine
        others: dict[str, Callable[[], Future[Any]]] = {
            "pause": engine.pause,
            "resume": engine.resume,
            "sleep": lambda: engine.sleep(SleepLevel(1 + (value % 3 == 0))),
            "wake": lambda: engine.wake(WakeStep(1 + (value % 4 > 0))),
            "probe": lambda: engine.probe([3, 4]),
        }
        if call in others:
            self.others.append(others[call]())
            if value % 2:
                self.others[-1].exception(self.harness.deadline_s)
        elif call == "submit":
            self._submit(value)
        elif call == "abort" and self.asked:
            name = list(self.asked)[value % len(self.asked)]
            self.aborted.add(name)
            engine.abort([name])
        elif call == "update":
            self.update()
        elif call == "call_off" and self.swaps:
            self.swaps[value % len(self.swaps)].cancel()
        elif call == "progress":
            self.parts.append(engine.progress(dict.fromkeys(self.asked, value % 7)))
            self.parts[-1].result(self.harness.deadline_s)

    def update(self) -> None:
        """Every version has a token of its own."""
        self.version += 1
        weights = self.harness.constant_weights(_FIRST_TOKEN + self.version)
        version = PolicyVersion(1, self.version)
        self.swaps.append(self.harness.engine.update_weights(version, weights.items(), str(version)))

    def finish(self) -> None:
        """Lets everything come to its end."""
        for call in ("wake", "resume"):
            self.step(call, 1)
        self.update()
        self.swaps[-1].result(self.harness.deadline_s)
        assert self.harness.engine.drain(self.harness.deadline_s), self.harness.engine.status()

    def _submit(self, value: int) -> None:
        kind = value % 4
        batch = []
        for index in range(1 + value % 5):
            name = f"{len(self.asked) + index}"
            prefix = constant_prefix(10, 1 + value % 6, _OLD) if kind == 1 else None
            tokens = 7 + value % 90
            batch.append(request(name, max_tokens=tokens, pinned=kind == 2, stream=value % 3 == 0, prefix=prefix))
        self.harness.engine.submit(batch)
        self.asked |= {item.request_id: item for item in batch}


@pytest.mark.parametrize(
    ("kv", "stride", "kind"),
    [("keep", 1, ScriptedHarness), ("interrupt", 2, ScriptedHarness), ("keep", 2, RestartingHarness)],
)
@settings(max_examples=30, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(_CALLS), st.integers(0, 1000)), max_size=25), weights=st.booleans())
@example(calls=[("update", 0), ("sleep", 0), ("progress", 0), ("sleep", 0)], weights=False)
def test_any_order_of_calls(
    kv: KvPolicy, stride: int, kind: type[ScriptedHarness], calls: list[tuple[str, int]], weights: bool
) -> None:
    harness = kind(kv, stride)
    try:
        walk = _Walk(harness)
        if weights:
            walk.update()
        for call, value in calls:
            walk.step(call, value)
        walk.finish()
        _check(walk)
    finally:
        harness.close()
    assert harness.unfinished() == 0


def _check(walk: _Walk) -> None:
    collector, status = walk.harness.collector, walk.harness.engine.status()
    assert collector.failure is None
    assert collector.results.keys() == walk.asked.keys()
    for swap in walk.swaps:
        assert swap.cancelled() or swap.result(walk.harness.deadline_s).version
    for other in walk.others:
        assert isinstance(other.exception(walk.harness.deadline_s), EngineError | WeightsError | None)
    sampled = 0
    for name, asked in walk.asked.items():
        result, brought = collector.results[name], 0
        ids, versions = result.sampled.response_ids.tolist(), list(result.sampled.versions)
        if asked.prefix is not None:
            brought = len(asked.prefix)
            np.testing.assert_array_equal(result.sampled.log_probs[:brought], asked.prefix.log_probs)
        sampled += len(ids) - brought
        assert len(result.sampled.log_probs) == len(versions) == len(ids)
        assert versions[:brought] == [_OLD] * brought
        assert ids == [10] * brought + [_FIRST_TOKEN + version.version for version in versions[brought:]]
        assert versions == sorted(versions), "versions went back"
        assert not asked.pinned or len(result.sampled.versions.runs) <= 1
        whole = len(ids) == asked.sampling.max_tokens
        assert result.finish_reason == ("length" if whole else "aborted")
        assert whole or name in walk.aborted or asked.pinned, "nobody asked for its end"
        if asked.stream and len(ids) > brought:
            events = joined(collector.events, name)
            assert events.response_ids.tolist() == ids[brought:]
            assert list(events.versions) == versions[brought:]
    assert status.tokens_generated == sampled
    assert (status.active, status.queued, status.state) == (0, 0, "running")
    assert walk.harness.backend.start_limit <= walk.harness.slots + 1
    for part in (part for parts in walk.parts for part in parts.result(0)):
        result = collector.results[part.request_id]
        assert part.sampled.response_ids.tolist() == result.sampled.response_ids[: len(part.sampled)].tolist()

"""The engines' benchmarks: equal requests for all contenders, a rate of the middle alone, checked responses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.engines.engine_alone import group_requests
from benchmarks.engines.fake_learner import task_of
from benchmarks.engines.overhead import summary
from benchmarks.engines.plan import Arrival, Plan, steady_rate
from benchmarks.engines.swap_observer import Watcher
from benchmarks.engines.worker_process import MeasurementError, spent
from rollmesh.generators.engines.types import GenerationRequest, GenerationResult, SamplingParams, TokenEvent
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns

PLAN = Plan(engine="vllm", model=Path("none"), prompts=((3, 4), (5, 6, 7)), groups=9, n=2, slots=4)
V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def test_all_contenders_are_asked_for_the_same() -> None:
    requests = group_requests(PLAN, "1")
    tasks = [task_of(PLAN, index, ordinal=100 + index) for index in range(PLAN.groups)]
    asked = [(np.frombuffer(task.prompt_ids, "<i4").tolist(), task.sampling.max_tokens) for task in tasks]
    assert [(list(r.prompt_ids), r.sampling.max_tokens) for r in requests[:: PLAN.n]] == asked
    assert sum(r.sampling.max_tokens for r in requests) == PLAN.tokens
    lengths = sorted(length for _, length in asked)
    assert (lengths[0], lengths[-1]) == (PLAN.shortest, PLAN.longest)
    assert max(np.diff(lengths)) == 24


def test_the_rate_is_that_of_the_middle() -> None:
    # Ten tokens a second, slow at both ends, where slots are empty.
    times = [5.0, 6.0, 7.0, 8.0, 8.1, 8.2, 8.3, 8.4, 8.5, 20.0, 30.0, 40.0, 50.0]
    arrivals = [Arrival(at, 1, 1) for at in times]
    assert steady_rate(arrivals[::-1], 4) == pytest.approx(10.0)
    with pytest.raises(ValueError, match="too few"):
        steady_rate(arrivals[:8], 4)


def test_ratios_are_taken_within_a_round_to_the_faster_way() -> None:
    def one(name: str, rate: float) -> dict[str, object]:
        return {"contender": name, "tokens_s": rate, "whole_tokens_s": rate, "cpu_us_per_token": {"front": 1e6 / rate}}

    rounds = [
        [one("delta", 100.0), one("final", 80.0), one("service", 90.0)],
        [one("service", 45.0), one("final", 41.0), one("delta", 50.0)],
    ]
    found = summary(rounds)
    assert found["held_to"] == "delta"
    assert found["contenders"]["service"]["ratio"].low == pytest.approx(0.9)
    assert found["contenders"]["service"]["ratio"].high == pytest.approx(0.9)


def test_processes_that_did_nothing_are_left_out() -> None:
    assert spent({"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 2.0, "new": 0.25}) == {"a": 0.5, "new": 0.25}


def _request(tokens: int) -> GenerationRequest:
    return GenerationRequest("7", [3, 4], SamplingParams(max_tokens=tokens), stream=True)


def _sampled(*runs: tuple[int, PolicyVersion]) -> Trajectory:
    count = sum(length for length, _ in runs)
    return Trajectory.sampled(np.zeros(count, np.int32), np.zeros(count, np.float32), VersionRuns(runs))


def _result(name: str, *runs: tuple[int, PolicyVersion], reason: str = "length") -> GenerationResult:
    return GenerationResult(name, _sampled(*runs), reason)  # type: ignore[arg-type] # a literal


def test_gaps_with_a_swap_are_told_from_others() -> None:
    watcher = Watcher()
    watcher.begin([_request(5)])
    for runs in ([(1, V1)], [(1, V1)], [(1, V2)], [(2, V2)]):
        watcher.on_tokens([TokenEvent("7.0", _sampled(*runs))])
    watcher.on_results([_result("7.0", (2, V1), (3, V2))])
    assert watcher.wait_below(1, 0)
    seen = watcher.seen
    assert (len(seen.gaps), len(seen.swap_gaps)) == (2, 1)
    assert (seen.finished, seen.crossed, seen.before, seen.after) == (1, 1, 2, 3)


def test_an_aborted_attempt_is_waste_and_is_tried_again() -> None:
    watcher = Watcher()
    watcher.begin([_request(3)])
    watcher.on_tokens([TokenEvent("7.0", _sampled((2, V1)))])
    watcher.on_results([_result("7.0", (2, V1), reason="aborted")])
    assert watcher.seen.discarded == 2
    assert [watched.name for watched in watcher.in_flight()] == ["7.1"]
    watcher.on_tokens([TokenEvent("7.1", _sampled((3, V2)))])
    watcher.on_results([_result("7.1", (3, V2))])
    assert watcher.wait_below(1, 0)
    assert watcher.seen.tokens == 3


@pytest.mark.parametrize("runs", [((1, V1),), ((1, V2), (2, V1))])
def test_a_response_that_is_not_what_it_should_be_ends_the_measurement(runs: tuple[tuple[int, PolicyVersion]]) -> None:
    watcher = Watcher()
    watcher.begin([_request(3)])
    watcher.on_tokens([TokenEvent("7.0", _sampled((3, V1)))])
    watcher.on_results([_result("7.0", *runs)])
    with pytest.raises(MeasurementError, match=r"7\.0"):
        watcher.wait_below(1, 0)

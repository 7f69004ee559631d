"""The fleet's simulator does as its scenario says, and a whole cell accounts for every group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fleet import cell
from benchmarks.fleet.cell import run_cell
from benchmarks.fleet.results import HEADER, ResultFile, row
from benchmarks.fleet.scenario import Lengths, Scenario
from benchmarks.fleet.scripted_source import ScriptedSource, TokenBank
from rollmesh.generators.engines.types import GenerationResult, SamplingParams
from rollmesh.generators.rollout.response_source import MemberRequest
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import trajectory_pb2

_LENGTHS = Lengths(median=40, most=100)


def request(name: str, ordinal: int, member: int = 0) -> MemberRequest:
    return MemberRequest(
        request_id=name,
        prompt_ids=[1],
        sampling=SamplingParams(),
        task=trajectory_pb2.PromptTask(ordinal=ordinal),
        member=member,
    )


def source(results: list[GenerationResult], slots: int, speed: float) -> ScriptedSource:
    def on_results(found: Sequence[GenerationResult]) -> None:
        results.extend(found)

    scripted = ScriptedSource(TokenBank(_LENGTHS.most), _LENGTHS, 1, slots, on_results)
    scripted.serving, scripted.speed = PolicyVersion(1, 3), speed
    return scripted


def test_lengths_are_those_of_the_script_in_each_attempt() -> None:
    drawn = [_LENGTHS.of(1, ordinal, 0) for ordinal in range(300)]
    assert drawn == [_LENGTHS.of(1, ordinal, 0) for ordinal in range(300)]
    assert 1 <= min(drawn) < 40 < max(drawn) <= 100
    assert float(np.mean(drawn)) == pytest.approx(_LENGTHS.mean, rel=0.2)


def test_every_generator_belongs_to_one_process_and_the_victims_to_their_own() -> None:
    scenario = Scenario(1003, victims=0.1, processes=3)
    victims, *others = scenario.shares()
    assert len(victims) == scenario.victim_count == 100
    assert [number for share in (victims, *others) for number in share] == list(range(1003))
    assert max(map(len, others)) - min(map(len, others)) <= 1
    _, frozen, *rest = replace(scenario, frozen=0.2).shares()
    assert (len(frozen), len(rest), rest[-1][-1]) == (201, 3, 1002)


def test_the_fleet_samples_at_its_rate_however_large_it_is() -> None:
    for generators in (10, 1000):
        scenario = Scenario(generators, rate=200.0)
        fast = (1 - scenario.slow) + scenario.slow / 10
        assert generators * scenario.slots * scenario.speed * fast / scenario.lengths.mean == pytest.approx(200.0)


async def test_a_response_is_as_long_as_scripted_and_continues_what_another_began() -> None:
    results: list[GenerationResult] = []
    scripted = source(results, slots=2, speed=0.0)
    prefix = TokenBank(_LENGTHS.most).response(5, None, PolicyVersion(1, 2))
    begun = MemberRequest(
        request_id="begun", prompt_ids=[1], sampling=SamplingParams(), prefix=prefix,
        task=trajectory_pb2.PromptTask(ordinal=9), member=1,
    )  # fmt: skip
    scripted.submit([request("a", 4), begun, request("gone", 5)])
    scripted.abort(["gone"])
    async with asyncio.timeout(30):
        while len(results) < 2:
            await asyncio.sleep(0)
    by_name = {result.request_id: result.sampled for result in results}
    assert len(by_name["a"]) == _LENGTHS.of(1, 4, 0)
    long = max(5, _LENGTHS.of(1, 9, 1))
    expected = ((5, PolicyVersion(1, 2)), (long - 5, PolicyVersion(1, 3)))
    assert by_name["begun"].versions.runs == tuple(run for run in expected if run[0])
    assert scripted.sampled == len(by_name["a"]) + long - 5


async def test_responses_beyond_the_slots_wait() -> None:
    scripted = source([], slots=2, speed=0.001)
    scripted.submit([request(str(number), number) for number in range(5)])
    assert (scripted.status().active, scripted.status().queued) == (2, 3)
    scripted.abort(["0", "1", "2"])
    assert (scripted.status().active, scripted.status().queued) == (2, 0)
    assert scripted.progress({"3": 1, "4": 1}).result() == [], "no token yet"


@pytest.mark.usefixtures("forked")
def test_a_cell_runs_the_whole_way_and_its_ledgers_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Figures of a full flow are not asked for, and all waits are as long as the fleet computes.
    monkeypatch.setattr(cell, "_FLOW_S", 0.1)
    monkeypatch.setattr(cell, "_SETTLE_S", 2.0)
    said: list[str] = []
    scenario = Scenario(6, rate=20.0, groups_per_step=2, seconds=1.0, processes=1, frozen=0.2, lease_s=3.0)
    result = run_cell(scenario, tmp_path, progress=said.append)
    assert result.wrong == []
    assert result.paced is not None
    assert result.saturated is not None
    assert result.saturated.trajectories_s > 0
    assert 0 < result.saturated.admission_ms[0] <= result.saturated.admission_ms[1]
    assert result.killed is not None
    assert result.frozen is not None
    assert result.killed.seconds > 0
    assert result.frozen.seconds > 0
    assert result.files["front"] > scenario.generators
    assert len(row(result)) == len(HEADER)
    assert len(said) == 7
    path = tmp_path / "results.json"
    assert not ResultFile(path).has(scenario)
    ResultFile(path).add(replace(result, scenario=replace(scenario, fronts=2)), {})
    ResultFile(path).add(result, {})
    results = ResultFile(path)
    assert results.has(scenario)
    assert not results.has(replace(scenario, seconds=2.0)), "another scenario of the same name"
    assert results.rows([scenario.name, "other"]) == [row(result)]
    assert len(results.rows(["N6/f1", "N6/f2"])) == 2, "earlier cells stay"

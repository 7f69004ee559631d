"""Evaluation rounds against a real buffer, answered by a script in place of a generator."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.evaluation.evaluator import EvalResult, Evaluator, RoundRules
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import trajectory_pb2
from tests.faults.proxy import Conditions, ProxyLoop
from tests.learner.live.eval_mesh import V0, V1, V2, mesh, tasks


def evaluator_of(
    client: BufferClient,
    prompts: list[trajectory_pb2.PromptTask],
    *,
    kept: list[EvalResult] | None = None,
    results: list[EvalResult] | None = None,
    missed: list[PolicyVersion] | None = None,
    status: LearnerStatus | None = None,
    timeout_s: float = 20,
) -> Evaluator:
    return Evaluator(
        client,
        prompts,
        RoundRules(1, timeout_s=timeout_s, right_at=1.0, measured_by="so"),
        lambda ids: " ".join(map(str, ids)),
        status or LearnerStatus(published=V0),
        Heard([] if kept is None else kept, [] if results is None else results, [] if missed is None else missed),
    )


class Heard:
    """Events for a listener of the rounds."""

    def __init__(self, kept: list[EvalResult], results: list[EvalResult], missed: list[PolicyVersion]) -> None:
        self.store_result, self.round_finished, self.round_abandoned = kept.append, results.append, missed.append


async def test_a_round_is_collected_settled_and_reported(tmp_path: Path) -> None:
    results: list[EvalResult] = []
    kept: list[EvalResult] = []
    async with mesh(tmp_path) as found:
        evaluator = evaluator_of(found.client, tasks(4), kept=kept, results=results)
        for policy in (V0, V1):
            assert await evaluator.start_round(policy)
            assert not await evaluator.start_round(policy)
            await found.answer(policy, 4)
            assert await evaluator.final_result(policy) is results[-1]
        ledger = await found.client.ledger("eval")
    assert [result.policy for result in results] == [V0, V1]
    assert kept == results, "kept before anybody is told"
    assert [row["row"] for row in results[0].rows] == [0, 1, 2, 3]
    assert results[0].rows[3]["responses"] == [
        {"text": "1 1", "reward": 3.0, "reason": "", "tokens": 2, "finish": "stop"},
        {"text": "4 5", "reward": None, "reason": "broken", "tokens": 2, "finish": "stop"},
    ]
    assert results[0].rows[0]["responses"][1]["text"] == "... 5", "the end of a long one"
    # One response of two is scored: it counts for pass@1, and for pass@2 there are too few.
    assert results[0].metrics == {"mean@2": 1.5, "maj@2": 1.5, "best@2": 1.5, "pass@1": 0.75}
    assert results[0].value("reward/odd") == 2.0
    assert (results[0].value("pass@1"), results[0].value("reward"), results[0].value("reward/x")) == (0.75, 1.5, None)
    assert results[0].reward == 1.5
    assert results[0].by_source == {"even": 1.0, "odd": 2.0}
    assert (results[0].scored, results[0].failed, results[0].response_length) == (4, 4, 2.0)
    assert list(ledger.discrepancies) == []
    assert ledger.recounted.trained == 8


@pytest.mark.parametrize("begun", [0, 2, 3])
async def test_a_round_that_no_one_can_serve_is_withdrawn_and_owed(tmp_path: Path, begun: int) -> None:
    status, missed = LearnerStatus(published=V1), list[PolicyVersion]()
    async with mesh(tmp_path) as found:
        evaluator = evaluator_of(found.client, tasks(3), status=status, missed=missed)
        await evaluator.start_round(V1)
        if begun:
            await found.give_back(V1, begun)
        status.published = V2
        assert evaluator._round is not None
        await asyncio.wait_for(evaluator._round, 180)
        assert evaluator.retry_due
        assert evaluator.latest is None
        assert missed == [V1]
        ledger = await found.client.ledger("eval")
        assert (ledger.recounted.withdrawn, ledger.recounted.pending) == (3 - begun, 0)
        assert (ledger.recounted.reasons["failed/withdrawn"], ledger.recounted.generating) == (begun, 0)
        assert await evaluator.start_round(V2)
        await found.answer(V2, 3)
        result = await evaluator.final_result(V2)
    assert result is not None
    assert not evaluator.retry_due


async def test_a_round_that_comes_due_while_another_runs_is_told_of_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results: list[EvalResult] = []
    async with mesh(tmp_path) as found:
        evaluator = evaluator_of(found.client, tasks(2), results=results)
        assert await evaluator.start_round(V0)
        for policy in (V0, V1, V2):
            assert not await evaluator.start_round(policy)
        told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
        await found.answer(V0, 2)
        assert await evaluator.final_result(V0) is results[0]
    assert len(told) == 1
    assert "version 1:1 is left out" in told[0]
    assert "eval.every_steps" in told[0]
    assert (evaluator.skipped, results[0].record()["eval/skipped"]) == (2, 2)


async def test_a_round_that_takes_too_long_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with mesh(tmp_path) as found:
        evaluator = evaluator_of(found.client, tasks(2), timeout_s=0.2)
        assert await evaluator.final_result(V0, attempts=1) is None
    assert "(eval.timeout_s), in which 0 of 2 prompts were answered and scored" in caplog.text


async def test_a_round_whose_stream_was_away_counts_every_prompt_once(tmp_path: Path) -> None:
    proxies = ProxyLoop()
    async with mesh(tmp_path) as found:
        link = proxies.link(int(found.address.rpartition(":")[2]))
        channel = open_channel(link.address, SecuritySection())
        try:
            client = BufferClient(channel, timeout_s=5, retry_s=20)

            async def until(leased: int, ready: int) -> None:
                async with asyncio.timeout(240):
                    counts = None
                    while counts is None or (counts.leased, counts.ready) != (leased, ready):
                        counts = (await found.client.describe("eval")).counts
                        await asyncio.sleep(0.02)

            evaluator = evaluator_of(client, tasks(4))
            await evaluator.start_round(V0)
            await found.answer(V0, 2)
            await until(leased=2, ready=0)
            await asyncio.to_thread(link.apply, "*", Conditions("cut"))
            await until(leased=0, ready=2)
            await asyncio.to_thread(link.apply, "*", Conditions())
            await found.answer(V0, 2)
            result = await evaluator.final_result(V0, attempts=0)
            ledger = await found.client.ledger("eval")
        finally:
            await channel.close()
            await asyncio.to_thread(link.close)
            proxies.close()
    assert result is not None
    assert [row["row"] for row in result.rows] == [0, 1, 2, 3]
    assert (ledger.recounted.trained, list(ledger.discrepancies)) == (4, [])

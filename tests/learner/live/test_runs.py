"""Whole runs: real buffer with Redis, real generator, real learner, each a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from rollmesh.buffer.client.client import BufferClient, PendingWrite
from rollmesh.generators.engines.hf.weights import ModelWeights, StagedWeights
from rollmesh.generators.rollout.active_group import ActiveGroup
from rollmesh.generators.rollout.encoding import member_write
from rollmesh.learner.checkpoint.names import list_checkpoints
from rollmesh.learner.coordinator import mesh_session
from rollmesh.learner.coordinator.coordinator import Coordinator
from rollmesh.learner.engines.fsdp2 import step
from rollmesh.learner.metrics.catalogue import describe
from rollmesh.learner.recording.recording import FOLDER, Recording
from rollmesh.learner.recovery.consumption_log import StepUse, read_log, surviving_uses
from rollmesh.learner.standby import how_finished
from rollmesh.mesh.access.roles import Role, new_identity
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import (
    CallbackError,
    DivergedError,
    FencedError,
    MismatchError,
    StarvedError,
    TakeoverRefusedError,
    UnreachableError,
)
from rollmesh.mesh.preemption.sources import FileSource
from rollmesh.mesh.preemption.watcher import watch_for_notice
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.trajectory.payload_codec import decode, encode
from rollmesh.protos import buffer_pb2, learner_pb2, learner_pb2_grpc
from tests.learner.live.tiny import make_config, meanwhile, mesh_of, open_mesh, run_learner
from tests.learner.ranks import run_two_ranks


def records(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]


def summary(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((config.run.folder / "learner.json").read_text())
    return found


def undescribed(written: list[dict[str, Any]]) -> set[str]:
    """Names of metrics that the catalogue does not know, nor as the second name of another in their record."""
    return {
        name
        for record in written
        for name in record
        if describe(name) is None
        and not any(metric and name in metric.aliases_of(other) for other in record for metric in (describe(other),))
    }


def uses(config: Config) -> list[StepUse]:
    return list(read_log(config.run.folder / "consumption.jsonl"))


async def ask(mesh: str, question: Callable[[BufferClient], Any], security: SecuritySection | None = None) -> Any:
    channel = open_channel(mesh, security or SecuritySection(), new_identity(Role.OPERATOR))
    try:
        return await question(BufferClient(channel, timeout_s=5, retry_s=10))
    finally:
        await channel.close()


def ledger(mesh: str, table: str = "train", *, security: SecuritySection | None = None) -> buffer_pb2.LedgerResponse:
    """The ledger, which must balance."""
    response: buffer_pb2.LedgerResponse = asyncio.run(ask(mesh, lambda client: client.ledger(table), security))
    assert list(response.discrepancies) == []
    return response


def assert_nothing_twice(config: Config) -> None:
    counted = Counter((g.group_id, g.use) for use in surviving_uses(uses(config)) for g in use.groups)
    assert counted
    assert max(counted.values()) == 1


def wait_for_line(path: Path, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = 240.0) -> None:
    """Waits until a jsonl file of another process holds a line."""
    alarm = threading.Event()
    deadline = timeout_s / 0.02
    while deadline > 0:
        lines = path.read_text().splitlines() if path.exists() else []
        if any(wanted(json.loads(line)) for line in lines if line.endswith("}")):
            return
        alarm.wait(0.02)
        deadline -= 1
    raise AssertionError(f"{path} never held the line")


CALLBACKS = """
import json
import rollmesh

class Notes(rollmesh.Callback):
    def note(self, run, event):
        heard = [type(event).__name__, getattr(event, "version", getattr(event, "reason", None))]
        with (run.folder / "notes.jsonl").open("a") as file:
            print(json.dumps(heard), file=file)

    on_run_start = on_version_published = on_evaluation_end = on_checkpoint_committed = on_run_end = note

    def on_step_end(self, run, step):
        self.note(run, step)
        assert step.metrics["tokens"] > 0

class Odd(rollmesh.Callback):
    def on_step_end(self, run, step):
        raise ValueError("odd")
"""


def notes(config: Config, kind: str) -> list[Any]:
    """Versions of the events of one kind, as a callback has heard of them."""
    lines = (config.run.folder / "notes.jsonl").read_text().splitlines()
    return [version for name, version in map(json.loads, lines) if name == kind]


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    (tmp_path / "callbacks.py").write_text(CALLBACKS)
    keys = {"learner.steps": 8, "eval.every_steps": 4, "logging.tensorboard": True, "logging.tables_every_steps": 4}
    config = make_config(tmp_path, {**keys, "logging.callbacks": [f"{tmp_path / 'callbacks.py'}:Notes"]})
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
        counts = ledger(mesh).recounted
        assert counts.trained == 8 * 4
        assert counts.consumed == counts.leased == 0
        assert ledger(mesh, "eval").recounted.trained >= 2 * 8
    steps = [r for r in records(config) if "critic/score/mean" in r]
    assert [r["step"] for r in steps] == list(range(1, 9))
    for name in (
        "tokens_per_second",
        "timing_s/gen",
        "actor/loss",
        "staleness/histogram",
        "clock/waiting_for_inserts_s",
    ):
        assert name in steps[-1]
    assert max(r["staleness/max"] for r in steps) <= config.buffer.max_staleness
    # At the version that sampled them, the learner computes the same log-probs as the generator.
    assert steps[0]["staleness/max"] == 0
    assert steps[-1]["clock/stalls"] == 0
    assert steps[0]["rollout_corr/log_ratio_max"] < 1e-4
    outcome = summary(config)
    assert (outcome["steps"], outcome["version"], outcome["stop_reason"]) == (8, 8, "steps")
    assert how_finished(config.run.folder) == "steps"
    assert (outcome["eval_first"]["version"], outcome["eval_last"]["version"]) == (0, 8)
    assert outcome["eval_last"]["scored"] == 8
    assert sum(outcome["staleness_tokens"].values()) == outcome["tokens_trained"] == sum(r["tokens"] for r in steps)
    assert outcome["pushes"]["count"] > 0
    samples = [json.loads(line) for line in (config.run.folder / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == set(range(1, 9))
    assert samples[0]["versions"] == [[len_ := samples[0]["versions"][0][0], 1, 0]]
    assert len_ >= len(samples[0]["response"])
    assert samples[0]["tokens"]["count"] == len_
    assert samples[0]["tokens"]["staleness"] == ([[len_, 0]] if len_ > 2 else [0] * len_)
    # A group whose responses are all rewarded alike needs no forward pass.
    current = next(
        sample["tokens"]
        for sample in samples
        if "policy_log_probs" in sample["tokens"]
        and {version for *_, version in sample["versions"]} == {sample["step"] - 1}
    )
    assert current["policy_log_probs"] == pytest.approx(current["log_probs"], abs=1e-3)
    assert list((config.run.folder / "tensorboard").iterdir())
    assert (steps[-1]["trackers/lost_records"], steps[-1]["callbacks/failed"]) == (0, 0)
    assert_nothing_twice(config)
    assert notes(config, "StepEnd") == list(range(1, 9))
    assert notes(config, "PublishedVersion") == list(range(9))
    assert notes(config, "EvaluationEnd")[-1] == 8
    assert notes(config, "CommittedCheckpoint")[-1] == 8
    assert (notes(config, "RunStart"), notes(config, "RunEnd")) == ([0], ["steps"])


def test_a_callback_that_raises_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "callbacks.py").write_text(CALLBACKS)
    named = [f"{tmp_path / 'callbacks.py'}:{name}" for name in ("Odd", "Notes")]
    config = make_config(tmp_path, {"learner.steps": 1000, "data.eval": None, "logging.callbacks": named})
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == CallbackError.exit_code
    (reason,) = notes(config, "RunEnd")
    assert reason == "error"
    trained = max(record["step"] for record in records(config))
    newest, _ = list_checkpoints(config.run.folder / "checkpoints")[-1]
    assert newest.version == trained


def test_another_contract_ends_as_well(tmp_path: Path) -> None:
    """On the policy alone, and committed with each step."""
    contract = {"buffer.max_staleness": 0, "buffer.commit": "step"}
    twice = {"learner.batch.minibatches": 2, "learner.batch.epochs": 2}
    config = make_config(tmp_path, {**contract, **twice, "eval.every_steps": 3})
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
        assert ledger(mesh).recounted.trained == 6 * 4
    steps = [r for r in records(config) if "critic/score/mean" in r]
    assert max(r["staleness/max"] for r in steps) <= config.buffer.max_staleness
    assert summary(config)["eval_last"]["version"] == 6


def test_sigterm_or_a_notice_finishes_the_step_another_learner_goes_on_and_a_request_finishes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request comes after others for a checkpoint and the status."""
    # No stream of a generator holds up the end of a learner.
    monkeypatch.setattr(mesh_session, "_SERVER_GRACE_S", 3600.0)
    # A step of this model is far shorter than the usual time between two questions.
    monkeypatch.setattr("rollmesh.learner.service.watch_for_notice", partial(watch_for_notice, every_s=0.02))
    config = make_config(tmp_path, {"learner.steps": 100_000, "checkpoint.every_s": None, "data.eval": None})
    notice = tmp_path / "notice"
    notices = FileSource(str(notice))
    answers: list[Any] = []

    async def talk(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = learner_pb2_grpc.LearnerControlStub(channel)
            answers.append(await stub.Checkpoint(learner_pb2.CheckpointRequest(), timeout=180))
            answers.append(await stub.Status(learner_pb2.LearnerStatusRequest(), timeout=180))
            await stub.Stop(learner_pb2.StopRequest(), timeout=180)

    ends: dict[str, Callable[[], object]] = {
        "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
        str(notice): notice.touch,
        "request": lambda: asyncio.run(talk(json.loads((tmp_path / "ready").read_text())["address"])),
    }

    trained = 0
    with mesh_of(config) as mesh:
        for reason, end in ends.items():

            def end_it(version: int = trained + 1, end: Callable[[], object] = end) -> None:
                wait_for_line(config.run.folder / "metrics.jsonl", lambda line: line["step"] == version + 1)
                end()

            with meanwhile(end_it):
                watched = None if reason == "request" else notices
                assert run_learner(config, mesh, preemption=watched, ready_file=tmp_path / "ready") == 0
            stopped = summary(config)
            assert stopped["stop_reason"].startswith(reason)
            trained = stopped["version"]
            counts = ledger(mesh).recounted
            assert counts.trained == trained * 4
            assert counts.consumed == 0
            # The first two left in order: no operator has to force the takeover.
            assert how_finished(config.run.folder) == (reason if reason == "request" else "")
    written, status = answers
    assert Path(written.path).is_dir()
    assert status.committed_version >= written.version >= 2
    assert status.total_steps >= 2
    assert status.metrics["critic/score/mean"] >= 0
    assert summary(config)["incarnation"] == len(ends)
    assert [r["step"] for r in records(config)] == list(range(1, trained + 1))
    assert_nothing_twice(config)


def test_a_superseded_learner_ends_with_its_own_code_and_then_refuses_the_run(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"learner.steps": 100_000, "data.eval": None})

    def take_over(mesh: str) -> None:
        wait_for_line(config.run.folder / "consumption.jsonl", lambda line: line["train_version"] == 1)
        with pytest.raises(TakeoverRefusedError):
            asyncio.run(ask(mesh, lambda client: client.resume("train", "other", 0)))
        asyncio.run(ask(mesh, lambda client: client.resume("train", "other", 0, takeover=True)))

    with mesh_of(config) as mesh:
        with meanwhile(lambda: take_over(mesh)):
            assert run_learner(config, mesh) == FencedError.exit_code
        # The other holds it.
        assert run_learner(config, mesh) == TakeoverRefusedError.exit_code


def test_a_refused_claim_changes_nothing_and_the_data_end_with_a_short_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group of the claim is replaced."""
    config = make_config(tmp_path, {"data.epochs": 1, "learner.batch.groups": 12, "data.eval": None})
    claim, attempts = BufferClient.claim, Counter[int]()

    async def lose_a_lease_first(self: BufferClient, table: str, incarnation: int, version: int, leases: Any) -> Any:
        attempts[version] += 1
        if version == 1 and attempts[version] == 1:
            await self.nack(table, incarnation, leases[:1], buffer_pb2.NACK_DISPOSITION_RELEASE)
        return await claim(self, table, incarnation, version, leases)

    monkeypatch.setattr(BufferClient, "claim", lose_a_lease_first)
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
        assert ledger(mesh).recounted.trained == 40
    assert attempts == {0: 1, 1: 2, 2: 1, 3: 1}
    assert [(r["groups"], r.get("dropped/lease_lost", 0)) for r in records(config)] == [
        (12, 0),
        (12, 1),
        (12, 0),
        (4, 0),
    ]
    assert summary(config)["stop_reason"] == "end_of_data"
    assert_nothing_twice(config)


def test_a_run_survives_a_restart_of_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, {"learner.steps": 10})
    evaluate_last, found = Coordinator._evaluate_last, list[str]()
    claim, away = BufferClient.claim, threading.Event()

    def look_first(self: Coordinator, *how: Any) -> None:
        found.extend(folder.name for _, folder in list_checkpoints(config.run.folder / "checkpoints"))
        evaluate_last(self, *how)

    async def claim_when_it_is_away(self: BufferClient, table: str, *claimed: Any) -> Any:
        if claimed[1] == 5:
            await asyncio.to_thread(away.wait)
        return await claim(self, table, *claimed)

    monkeypatch.setattr(Coordinator, "_evaluate_last", look_first)
    # The learner is in the midst of its steps, however fast they are.
    monkeypatch.setattr(BufferClient, "claim", claim_when_it_is_away)

    with open_mesh(config) as mesh:

        def restart() -> None:
            wait_for_line(config.run.folder / "consumption.jsonl", lambda line: line["train_version"] == 3)
            mesh.stop_buffer()
            away.set()
            mesh.start_buffer()

        with meanwhile(restart):
            assert run_learner(config, mesh.address) == 0
        assert ledger(mesh.address).recounted.trained == 10 * 4
    assert found[-1] == "i0001-v00000010", "the last evaluation may take long: the last step is on disk before"
    assert summary(config)["incarnation"] == 1
    assert summary(config)["eval_last"]["version"] == 10
    assert_nothing_twice(config)


def test_a_learner_that_loses_the_mesh_leaves_its_last_step_on_disk(tmp_path: Path, capfd: Any) -> None:
    config = make_config(tmp_path, {"learner.steps": 100_000, "checkpoint.every_s": None, "data.eval": None})
    impatient = config.model_copy(update={"network": config.network.model_copy(update={"retry_s": 1.0})})
    with open_mesh(config) as mesh:

        def lose_it() -> None:
            wait_for_line(config.run.folder / "metrics.jsonl", lambda line: line["step"] == 3)
            mesh.stop_buffer()

        with meanwhile(lose_it):
            assert run_learner(impatient, mesh.address) == UnreachableError.exit_code
        (left,) = (config.run.folder / "checkpoints").glob("i*")
        trained = records(config)[-1]["step"]
        assert left.name == f"i0001-v{trained:08d}"
        assert f"the next start continues from {left.name})" in capfd.readouterr().err
        mesh.start_buffer()
        further = config.model_copy(
            update={"learner": config.learner.model_copy(update={"steps": trained + 2})},
        )
        assert run_learner(further, mesh.address, takeover=True) == 0
        assert ledger(mesh.address).recounted.trained == (trained + 2) * 4
    assert [use.train_version for use in uses(config) if use.incarnation == 2] == [trained, trained + 1]
    assert [r["step"] for r in records(config)] == list(range(1, trained + 3))
    assert_nothing_twice(config)


def test_the_run_ends_when_the_held_out_reward_is_reached(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"learner.steps": 100_000, "eval.every_steps": 2, "eval.stop_at": 0.0})
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
    assert summary(config)["stop_reason"] == "stop_at"
    assert summary(config)["eval_last"]["version"] == summary(config)["version"]


def test_rewards_that_always_fail_end_the_run_with_their_reason(tmp_path: Path, capfd: Any) -> None:
    config = make_config(tmp_path, {"learner.steps": 100_000, "data.eval": None})
    Path(tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    raise ValueError('no')\n"
    )
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == StarvedError.exit_code
        assert ledger(mesh).recounted.failed > 40
    said = capfd.readouterr().err
    assert "groups failed and no batch came together" in said
    assert "ValueError: no" in said


def test_gradients_that_stay_infinite_end_the_run_and_cost_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    config = make_config(
        tmp_path,
        {"learner.steps": 100_000, "learner.max_skipped": 2, "checkpoint.every_steps": 1, "data.eval": None},
    )
    clip, steps = step.clip_gradients, Counter[str]()

    def clip_twice(parameters: Any, most: float) -> float:
        steps["taken"] += 1
        return clip(parameters, most) if steps["taken"] <= 2 else float("nan")

    monkeypatch.setattr(step, "clip_gradients", clip_twice)
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == DivergedError.exit_code
        counts = ledger(mesh).recounted
    assert "the actor's gradient was not finite in 3 batches in a row" in capfd.readouterr().err
    assert (counts.trained, counts.consumed) == (2 * 4, 3 * 4), "what changed nothing is offered again"
    assert [version.version for version, _ in list_checkpoints(config.run.folder / "checkpoints")] == [1, 2]


def test_a_generator_with_wrong_weights_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Its log-probs are the learner's until it takes the weights of version 1 for others."""
    config = make_config(
        tmp_path, {"learner.steps": 100_000, "buffer.max_staleness": 0, "checkpoint.every_steps": 1, "data.eval": None}
    )
    stage, taken = ModelWeights.stage, itertools.count()

    def wrong_later(self: ModelWeights, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        factor = 1.0 if next(taken) == 0 else 50.0
        return stage(self, ((name, tensor * factor) for name, tensor in tensors))

    monkeypatch.setattr(ModelWeights, "stage", wrong_later)
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == MismatchError.exit_code
    said = capfd.readouterr().err
    assert re.search(r"log-probs of learner and generators, both of version \d, differ by .*mismatch.stop", said)
    steps = [record for record in records(config) if "mismatch/tokens" in record]
    assert all(record["mismatch/tokens"] > 0 for record in steps), "also where all rewards are equal"
    assert steps[0]["mismatch/log_prob_diff"] < 1e-4
    assert steps[-1]["mismatch/log_prob_diff"] > 1.0
    last = list_checkpoints(config.run.folder / "checkpoints")[-1][0].version
    assert last < steps[-1]["version"], "nothing of the last step is kept"


@pytest.mark.slow
def test_two_ranks_train_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of it: the policy and an online reward model; and a response that neither can read. Torchrun starts
    them.
    """
    written = itertools.count()

    def unknown_tokens_at_first(group: ActiveGroup, meta: Any, payload: bytes, **how: Any) -> PendingWrite:
        if group.group_id.startswith("train-") and next(written) == 0:
            trajectory = decode(payload)
            payload = encode(replace(trajectory, response_ids=np.full_like(trajectory.response_ids, 1 << 20)))
        return member_write(group, meta, payload, **how)

    monkeypatch.setattr("rollmesh.generators.rollout.submission.member_write", unknown_tokens_at_first)
    changes = {
        "algorithm.name": "prime",
        "algorithm.filter": {"accuracy_low": None},
        "learner.ranks": 2,
        "learner.steps": 2,
        "learner.batch.minibatches": 2,
        "learner.batch.tokens_per_micro_batch": 48,
        "logging.record": True,
        # For the store of torchrun.
        "security.allow_insecure": True,
    }
    config = make_config(tmp_path, changes)
    (tmp_path / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    with mesh_of(config) as mesh:
        run_two_ranks("tests.learner.live.two_ranks", tmp_path / "config.json", Path(mesh), torchrun=True)
        counts = ledger(mesh).recounted
        assert (counts.trained, counts.failed) == (2 * 4, 1)
    steps = [r for r in records(config) if "critic/score/mean" in r]
    assert [r["step"] for r in steps] == [1, 2]
    assert sum(r.get("dropped/payload_invalid", 0) for r in steps) == 1
    assert all({"prm/loss", "prm/accuracy", "actor/loss"} <= record.keys() for record in steps)
    assert undescribed(records(config)) == set()
    assert summary(config)["eval_last"]["version"] == 2
    assert_nothing_twice(config)
    # The ranks fetch their payloads; samples and recording have them all the same.
    samples = [json.loads(line) for line in (config.run.folder / "samples.jsonl").read_text().splitlines()]
    assert [sum(sample["step"] == step for sample in samples) for step in range(1, 3)] == [4] * 2
    recording = Recording(config.run.folder / FOLDER)
    assert recording.versions == [0, 1]
    for version in recording.versions:
        batch = recording.batch(version)
        assert batch is not None
        assert len(batch.payloads) == sum(len(group.members) for group in batch.groups)
        assert all(batch.payloads)

"""The generator service against the real buffer: everything it is told comes over the mesh."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rollmesh.buffer.server.process import BufferFront
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf.decode_turn import Stepper
from rollmesh.generators.engines.hf.decoder import Step
from rollmesh.generators.service import GeneratorOptions, serve
from rollmesh.mesh.access.code_permissions import AllowCode, CodeRule
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, UnreachableError
from rollmesh.mesh.runtime.service import Shutdown
from rollmesh.mesh.trajectory.payload_codec import Trajectory, decode
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, generator_pb2, membership_pb2, trajectory_pb2
from rollmesh.reward_service.server.service import serve as serve_rewards
from tests.generators.pacing import Pace
from tests.generators.world import ANY_CODE, DEADLINE_S, TOKENIZER, eventually, greedy_response, log_probs, mesh
from tests.joining import NOWHERE, when_it_waits


def drafts_of(grants: Iterable[buffer_pb2.GroupGrant]) -> dict[tuple[str, int], Trajectory]:
    """By group and member."""
    return {(grant.group_id, draft.member): decode(draft.payload) for grant in grants for draft in grant.drafts}


def prompt_of(group: buffer_pb2.LeasedGroup) -> list[int]:
    ids: list[int] = np.frombuffer(group.task.prompt_ids, "<i4").tolist()
    return ids


async def serve_at(mesh_address: str, shutdown: Shutdown, security: SecuritySection) -> int:
    options = GeneratorOptions(identity=Identity(Role.GENERATOR, "gen"), security=security, code=ANY_CODE)
    return await serve(mesh_address, shutdown, options)


async def test_it_can_be_ended_while_it_waits_for_the_mesh() -> None:
    shutdown = Shutdown()
    with when_it_waits(lambda: shutdown.request("enough")) as said:
        assert await serve_at(NOWHERE, shutdown, SecuritySection()) == 0
    assert said[0].startswith(f"waits for the mesh at {NOWHERE}, ")


async def test_a_key_that_is_not_there_is_named_before_it_joins() -> None:
    with when_it_waits(lambda: None) as said, pytest.raises(ConfigError, match=r"security\.endpoint_key_file none"):
        await serve_at(NOWHERE, Shutdown(), SecuritySection(endpoint_key_file=Path("none")))
    assert not said


async def test_a_key_of_another_server_that_is_not_there_is_named_before_a_model_comes(tmp_path: Path) -> None:
    reward = {"reward__endpoints": ["grpc://judge:1"], "reward__key_files": {"grpc://judge:1": "none"}}
    async with mesh(tmp_path, **reward) as world:
        with pytest.raises(ConfigError, match=r"reward\.key_files\.grpc://judge:1 none"):
            await world.generator()[0]


async def test_what_cannot_be_put_together_leaves_no_engine(tmp_path: Path) -> None:
    """Agents need a chat template, which is seen when the engine has been started already."""
    tool = tmp_path / "tool.py"
    tool.write_text(
        'def look(place: str) -> str:\n    """Looks.\n\n    Args:\n        place: where.\n    """\n    return place\n'
    )
    before = set(threading.enumerate())
    async with mesh(tmp_path, rollout__agent__tools=[f"{tool}:look"]) as world:
        await world.learner()
        task, _ = world.generator()
        with pytest.raises(ConfigError, match="need a chat template"):
            await task
        assert "hf-engine" not in {thread.name for thread in set(threading.enumerate()) - before}


async def test_code_that_is_not_allowed_here_is_refused_and_not_even_imported(tmp_path: Path) -> None:
    """The mesh says what runs; the generator's command line says whether it may."""
    trace = tmp_path / "imported"
    tool = tmp_path / "tool.py"
    tool.write_text(f"open({str(trace)!r}, 'w').close()\n")
    async with mesh(tmp_path, rollout__agent__tools=[f"{tool}:look"]) as world:
        for code in (CodeRule(AllowCode.NONE), CodeRule(AllowCode.LISTED, frozenset({"other.py:look"}))):
            task, _ = world.generator(code=code)
            with pytest.raises(ConfigError, match=f"rollout.agent.tools: {tool}:look") as error:
                await task
            assert f"--code {tool}:look" in error.value.hint
        assert not trace.exists()


async def test_groups_are_generated_scored_and_stored(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(12)
        world.generator("gen-1")
        batch = await learner.train(0)
        model = world.model(0)
        for group in batch:
            prompt = prompt_of(group)
            assert [member.member for member in group.members] == [0, 1, 2, 3]
            texts = set()
            for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
                assert meta.outcome == trajectory_pb2.OUTCOME_SCORED
                assert meta.generator == "gen-1"
                assert meta.prompt_tokens == len(prompt)
                found = decode(payload)
                assert meta.response_tokens == len(found.response_ids)
                assert found.versions.runs == ((len(found.response_ids), PolicyVersion(1, 0)),)
                expected = log_probs(model, prompt, found.response_ids.tolist())
                np.testing.assert_allclose(found.log_probs, expected, atol=1e-4)
                text = TOKENIZER.decode(found.response_ids, skip_special_tokens=True)
                texts.add(text)
                if meta.reward == 1.0:
                    assert str(int(group.task.prompt_text[:2]) + int(group.task.prompt_text[3:5])) in text
            assert len(texts) > 1, "the members of a group are drawn independently"
        ledger = await learner.client.ledger("train")
        assert not ledger.discrepancies


async def test_a_group_at_which_the_engine_ends_alone_fails_with_the_cause_and_no_other_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Stepper.turn

    def end(stepper: Stepper, *, pinned_only: bool) -> Step:
        if not stepper._waiting:
            return turn(stepper, pinned_only=pinned_only)
        ended = EngineError("the engine has died: exit code 1")
        ended.culprit = next(iter(stepper._waiting)).request.request_id
        ended.raised = "RuntimeError: illegal instruction"
        raise ended

    async with mesh(tmp_path) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(3)
        with monkeypatch.context() as patched:
            patched.setattr(Stepper, "turn", end)
            task, _ = world.generator()
            with pytest.raises(EngineError, match="the engine has died"):
                await task
        [note] = (await learner.client.ledger("train", 10)).failed
        assert (note.reason, list(note.causes)) == (
            "too_few_scored",
            [
                "the engine ended at it, tried alone: the engine has died: exit code 1; the last error in its log: "
                "RuntimeError: illegal instruction"
            ],
        )
        world.generator()
        assert len(await learner.sample(2, 0)) == 2


async def test_the_greedy_member_is_the_most_likely_response(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(6, greedy=1)
        world.generator("gen-1")
        batch = await learner.train(0)
        model, longest = world.model(0), world.config.rollout.max_response_tokens
        elsewhere = 0
        for group in batch:
            prompt = prompt_of(group)
            best = greedy_response(model, prompt, longest)
            responses = [decode(payload).response_ids.tolist() for payload in learner.payloads[group.group_id]]
            assert len(responses) == world.config.rollout.n + 1
            assert responses[-1] == best
            elsewhere += sum(response != best for response in responses[:-1])
            found = decode(learner.payloads[group.group_id][-1])
            np.testing.assert_allclose(found.log_probs, log_probs(model, prompt, best), atol=1e-4)
        assert elsewhere, "the other members are sampled"


@pytest.mark.parametrize("kv", ["recompute", "interrupt"])
async def test_version_stamps_are_those_of_the_weights_that_drew_the_token(tmp_path: Path, pace: Pace, kv: str) -> None:
    """Weights change three times while sequences run; each token's log-prob is that of the version it names."""
    async with mesh(
        tmp_path, endless=True, weights__kv=kv, rollout__max_response_tokens=100, rollout__slots=8
    ) as world:
        pace.tokens = 22
        learner = await world.learner()
        await learner.publish(0)
        world.generator("gen-1")
        control = await world.control("gen-1")
        await learner.seed(4)
        await world.holds(control)
        for version in (1, 2, 3):
            await learner.publish(version)
            await learner.swapped(version + 1)
            pace.tokens += 22
        pace.tokens = None
        batch = await learner.sample(4, 3)
        models = [world.model(version) for version in range(4)]
        swaps = 0
        for group in batch:
            prompt = prompt_of(group)
            for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
                found = decode(payload)
                response = found.response_ids.tolist()
                assert meta.oldest.version == found.versions.oldest.version
                start, every = 0, [log_probs(model, prompt, response) for model in models]
                for length, version in found.versions.runs:
                    part = slice(start, start + length)
                    scores = [of_model[part] for of_model in every]
                    np.testing.assert_allclose(found.log_probs[part], scores[version.version], atol=1e-4)
                    if length > 20:
                        others = [s for v, s in enumerate(scores) if v != version.version]
                        assert all(np.abs(found.log_probs[part] - other).max() > 1e-2 for other in others)
                    start += length
                swaps += len(found.versions.runs) - 1
        assert swaps >= 3, "no sequence was in flight at a swap"


async def test_a_generator_with_a_learner_says_that_it_loads_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the libraries are loaded: the learner is there, and not to blame."""
    loaded = threading.Event()
    monkeypatch.setattr("rollmesh.generators.generator.load_libraries", lambda _threads: loaded.wait(DEADLINE_S))
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        await learner.publish(0)
        world.generator("gen-1")
        control = await world.control("gen-1")

        async def loads() -> bool:
            status = await control.Status(generator_pb2.GeneratorStatusRequest(), timeout=180)
            members = await learner.agent.members(membership_pb2.ROLE_GENERATOR)
            return [status.waiting_reason, *(m.waiting_reason for m in members)] == ["loads the model"] * 2

        try:
            await eventually(loads)
        finally:
            loaded.set()


async def test_rewards_come_from_the_services_of_the_mesh(tmp_path: Path) -> None:
    async with mesh(tmp_path, reward__in_process=False) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(4)
        world.generator("gen-1")
        control = await world.control("gen-1")

        async def waits_for_rewards() -> bool:
            status = await control.Status(generator_pb2.GeneratorStatusRequest(), timeout=180)
            return "reward" in status.waiting_reason

        await eventually(waits_for_rewards)
        ended = Shutdown()
        rewards = asyncio.create_task(
            serve_rewards(world.config, ended, host="127.0.0.1", port=0, mesh=world.address, ready_file=None)
        )
        try:
            batch = await learner.sample(4, 0)
            assert all(m.outcome == trajectory_pb2.OUTCOME_SCORED for group in batch for m in group.members)
        finally:
            ended.request("the test is over")
            await rewards


async def test_rewards_come_from_a_server_of_somebody_elses(tmp_path: Path, third_party_server: str) -> None:
    async with mesh(tmp_path, reward__in_process=False, reward__endpoints=[third_party_server]) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(4)
        world.generator("gen-1")
        members = [member for group in await learner.sample(4, 0) for member in group.members]
        assert {member.outcome for member in members} == {trajectory_pb2.OUTCOME_SCORED}
        assert all("brevity" in member.components for member in members)


async def test_a_reward_that_fails_is_an_error_and_never_a_zero(tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if ground_truth in ('07', 7):\n        raise ValueError('no idea')\n    return 0.5\n"
    )
    async with mesh(tmp_path, reward__functions=[f"{scorer}:compute_score"]) as world:
        learner = await world.learner()
        await learner.publish(0)
        tasks = learner.tasks(3)
        tasks[1].ground_truth_json = '"07"'
        await learner.client.seed("train", learner.incarnation, tasks)
        world.generator("gen-1")
        batch = await learner.sample(2, 0)
        assert {m.reward for group in batch for m in group.members} == {0.5}

        async def failed() -> bool:
            return (await learner.client.ledger("train")).counters.failed == 1

        await eventually(failed)
        ledger = await learner.client.ledger("train", failed_limit=5)
        assert [group.task_id for group in ledger.failed] == ["t2"]
        assert not ledger.discrepancies


async def test_a_prompt_the_engine_refuses_ends_as_failed(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        await learner.publish(0)
        tasks = learner.tasks(3)
        tasks[0].prompt_ids = np.full(8, 5000, "<i4").tobytes()
        await learner.client.seed("train", learner.incarnation, tasks)
        world.generator("gen-1")
        assert len(await learner.sample(2, 0)) == 2

        async def failed() -> bool:
            return (await learner.client.ledger("train")).counters.failed == 1

        await eventually(failed)


async def test_pinned_groups_hold_the_weights_until_they_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None comes for a moment only once all were taken, however long the next of them take to come.
    taken = asyncio.Event()
    clock = SimpleNamespace(time=lambda: math.inf if taken.is_set() else 0.0)
    own = SimpleNamespace(Event=asyncio.Event, get_running_loop=lambda: clock, sleep=lambda _: taken.wait())
    monkeypatch.setattr("rollmesh.generators.weights.pinned_groups.asyncio", own)
    async with mesh(tmp_path, endless=True, rollout__slots=8) as world:
        learner = await world.learner()
        await learner.publish(0)
        world.generator("gen-1")
        control = await world.control("gen-1")
        tasks = learner.tasks(30, temperature=0.0, max_tokens=60)
        for task in tasks:
            task.n = 1
            task.pinned.CopyFrom(PolicyVersion(1, 0).to_proto())
        await learner.client.seed("eval", learner.incarnation, tasks)
        await world.holds(control)
        await learner.publish(1)
        stream = learner.client.sample("eval", learner.incarnation)
        stream.request(30, 0)
        groups: list[buffer_pb2.LeasedGroup] = []
        while len(groups) < 30:
            response = await stream.next(DEADLINE_S)
            assert response is not None, stream.waiting_reason
            groups += learner.taken(response)
        taken.set()
        await stream.close()
        for group in groups:
            assert group.members[0].oldest == group.members[0].newest == PolicyVersion(1, 0).to_proto()
        await learner.swapped(2)


async def test_a_new_learner_takes_the_generators_with_it(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        first = await world.learner()
        await first.publish(0)
        await first.seed(40)
        world.generator("gen-1")
        await first.train(0)
        await first.train(1)
        await first.stop()
        second = await world.learner("learner-2", version=1, takeover=True)
        assert second.incarnation == 2
        await second.publish(1)
        await second.swapped(1)
        batch = await second.train(1)
        assert len(batch) == 4
        assert any(meta.newest.incarnation == 1 for group in batch for meta in group.members), "groups stand"
        ledger = await second.client.ledger("train")
        assert not ledger.discrepancies


async def test_a_drained_generator_gives_its_groups_back_at_once(tmp_path: Path, pace: Pace) -> None:
    """With what it has sampled of them: the next one continues from there."""
    pace.tokens = 20
    async with mesh(
        tmp_path,
        endless=True,
        weights__kv="recompute",
        rollout__max_response_tokens=60,
        buffer__lease_s=60.0,
        buffer__reconnect_grace_s=59.0,
        buffer__compression="zstd",
    ) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(4)
        task, _ = world.generator("gen-1")
        control = await world.control("gen-1")
        await world.holds(control, 4)
        await control.Drain(generator_pb2.DrainRequest(timeout_ms=10), timeout=180)
        assert await asyncio.wait_for(task, 240) == 0
        assert "gen-1" not in await world.members()
        drafts = drafts_of(await world.grants(4))
        assert len(drafts) == 16, "of every member"
        await learner.publish(1)
        pace.tokens = None
        world.generator("gen-2")
        batch = await learner.sample(4, 1)
        assert {meta.generator for group in batch for meta in group.members} == {"gen-2"}
        assert {group.attempt for group in batch} == {3}
        models = [world.model(version) for version in range(2)]
        for group in batch:
            for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
                assert b"zstd" in payload
                found, draft = decode(payload), drafts[group.group_id, meta.member]
                count, response = len(draft.response_ids), found.response_ids.tolist()
                assert response[:count] == draft.response_ids.tolist()
                assert len(response) == 60
                assert found.versions.runs == ((count, PolicyVersion(1, 0)), (60 - count, PolicyVersion(1, 1)))
                before, after = (log_probs(model, prompt_of(group), response) for model in models)
                np.testing.assert_allclose(found.log_probs[:count], before[:count], atol=1e-4)
                np.testing.assert_allclose(found.log_probs[count:], after[count:], atol=1e-4)


async def test_cancelled_groups_free_their_slots(tmp_path: Path, pace: Pace) -> None:
    """A group that has grown too old while it is sampled is stopped, nothing of it is written, and others take its
    place.
    """
    pace.tokens = 20
    async with mesh(
        tmp_path, endless=True, rollout__max_response_tokens=60, rollout__slots=8, buffer__max_staleness=1
    ) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(2)
        task, _ = world.generator("gen-1")
        control = await world.control("gen-1")
        await world.holds(control, 2)
        for version in (1, 2):
            await learner.publish(version)

        async def cancelled() -> bool:
            return await world.gauge("gen-1", "groups_cancelled") == 2

        async def decoding() -> bool:
            status = await control.Status(generator_pb2.GeneratorStatusRequest(), timeout=180)
            assert status.weights_transport == "shm"
            return (status.groups_held, status.active_sequences, status.queued_sequences) == (2, 8, 0)

        await eventually(cancelled)
        await eventually(decoding)
        ledger = await learner.client.ledger("train")
        assert ledger.counters.evicted_stale == ledger.counters.cancelled == ledger.counters.generating == 2
        assert ledger.counters.superseded_writes == 0
        assert not ledger.discrepancies
        await control.Drain(generator_pb2.DrainRequest(timeout_ms=10), timeout=180)
        assert await asyncio.wait_for(task, 240) == 0


async def test_prompts_by_hand_and_status(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        world.generator("gen-1")
        control = await world.control("gen-1")
        manifest = None

        async def announced() -> None:
            nonlocal manifest
            manifest = learner.publisher.newest

        await learner.publish(0, before_announcing=announced)
        await learner.swapped(1)
        request = generator_pb2.GenerateRequest(
            prompt="12+30=", sampling=trajectory_pb2.SamplingParams(temperature=0.0, max_tokens=7)
        )
        first = await control.Generate(request, timeout=120)
        again = await control.Generate(request, timeout=120)
        assert first.response_ids == again.response_ids
        assert len(first.response_ids) == len(first.log_probs) == len(first.versions)
        expected = log_probs(world.model(0), TOKENIZER.encode("12+30="), first.response_ids)
        np.testing.assert_allclose(np.array(first.log_probs), expected, atol=1e-4)
        status = await control.Status(generator_pb2.GeneratorStatusRequest(), timeout=180)
        assert status.weights_transport == "shm"
        assert status.serving == PolicyVersion(1, 0).to_proto()
        assert manifest is not None
        assert status.weights_digest == manifest.digest
        assert status.engine == "hf"


async def test_the_front_may_go_and_come_back(tmp_path: Path, pace: Pace) -> None:
    pace.tokens = 20
    async with mesh(tmp_path, endless=True, rollout__max_response_tokens=60) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(4)
        world.generator("gen-1")
        await world.holds(await world.control("gen-1"), 4)
        port = int(world.address.rpartition(":")[2])
        await world.buffer.stop()
        world.buffer = BufferFront(world.config, host="127.0.0.1", port=port)
        await world.buffer.start()
        pace.tokens = None
        batch = await learner.sample(4, 0)
        assert {group.attempt for group in batch} == {1}, "the leases survived"
        assert not (await learner.client.ledger("train")).discrepancies


async def test_a_buffer_that_stays_away_ends_the_generator(tmp_path: Path) -> None:
    async with mesh(tmp_path, network__retry_s=1.0) as world:
        learner = await world.learner()
        await learner.publish(0)
        task, _ = world.generator("gen-1")
        await learner.swapped(1)
        await world.buffer.stop()
        with pytest.raises(UnreachableError):
            await asyncio.wait_for(task, DEADLINE_S)
        with contextlib.suppress(UnreachableError):
            await learner.stop()

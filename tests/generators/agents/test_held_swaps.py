"""Weights do not change while episodes of an evaluation are under way, between their turns neither."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2
from tests.generators import world as world_module
from tests.generators.agents.scene import HERE
from tests.generators.world import DEADLINE_S, TOKENIZER, mesh

_TEMPLATE = "{% for m in messages %}{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}={% endif %}"


async def test_pinned_episodes_are_of_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", _TEMPLATE)
    agent = {"environment": f"{Path(HERE).resolve()}:Gym", "max_turns": 6, "turn_tokens": 8}
    overrides = {
        "rollout__slots": 8, "rollout__max_response_tokens": 120, "rollout__agent__environment": agent["environment"],
        "rollout__agent__max_turns": 6, "rollout__agent__turn_tokens": 8, "reward__functions": ["environment"],
    }  # fmt: skip
    async with mesh(tmp_path, endless=True, **overrides) as world:
        learner = await world.learner()
        await learner.publish(0)
        world.generator("gen-1")
        control = await world.control("gen-1")
        tasks = learner.tasks(12, temperature=1.0, max_tokens=100)
        for task in tasks:
            task.n = 2
            task.messages_json = json.dumps([{"role": "user", "content": task.prompt_text}])
            task.pinned.CopyFrom(PolicyVersion(1, 0).to_proto())
        await learner.client.seed("eval", learner.incarnation, tasks)
        await world.holds(control)
        # Weights are asked for while pinned episodes are between turns, again and again.
        await learner.publish(1)
        await learner.publish(2)
        stream = learner.client.sample("eval", learner.incarnation)
        stream.request(12, 0)
        groups: list[buffer_pb2.LeasedGroup] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(groups) < 12:
                response = await stream.next(DEADLINE_S)
                assert response is not None, stream.waiting_reason
                groups += learner.taken(response)
        await stream.close()
        pinned = PolicyVersion(1, 0).to_proto()
        for group in groups:
            for meta in group.members:
                assert meta.oldest == meta.newest == pinned
                assert meta.reward == 2.0, meta.reason
        await learner.swapped(2)
    assert world_module.TOKENIZER is TOKENIZER

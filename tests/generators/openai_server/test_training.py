"""An unmodified agent in a mesh: from dataset rows to trajectories that a learner trains on."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from rich.console import Console

from rollmesh.launcher.console.members_table import members_table
from rollmesh.learner.data.prompts import AgentPrompts, PromptEncoder, TaskShape
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.trajectory.payload_codec import decode
from rollmesh.protos import membership_pb2, trajectory_pb2
from tests.generators.openai_server.world import EOS, chances, chat_tokenizer, markov_model
from tests.generators.world import TOKENIZER, eventually, mesh

AGENTS = Path(__file__).parents[1] / "program_agents" / "program_agents.py"


async def test_trajectories_of_an_agent_reach_the_learner(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "rollout__agent__program": f"{AGENTS}:two_turns",
        "rollout__endpoint__enabled": True,
        "rollout__max_prompt_tokens": 64,
        "rollout__max_response_tokens": 64,
        "rollout__n": 2,
    }
    async with mesh(tmp_path, **settings) as world:
        tokenizer = chat_tokenizer()
        # As with most models, one token begins every conversation.
        tokenizer.chat_template = "<eos>" + tokenizer.chat_template
        log_chances = chances(tokenizer)
        # Under version 0 the weights are the model's own.
        model = markov_model(log_chances)
        model.save_pretrained(world.model_folder)
        tokenizer.save_pretrained(world.model_folder)
        world.model = lambda version: model  # type: ignore[method-assign, assignment]
        assert len(tokenizer) != len(TOKENIZER)
        learner = await world.learner()
        await learner.publish(0)
        encoder = PromptEncoder(
            tokenizer,
            max_prompt_tokens=64,
            template_kwargs={},
            agent=AgentPrompts.of(world.config.rollout.agent),
        )
        shape = TaskShape(n=2, temperature=1.0, max_tokens=64)
        rows = [Row([{"role": "user", "content": f"fox {index}"}], "any", "42", {}) for index in range(4)]
        tasks = [
            encoder.encode(row, shape, number=index, task_id=f"t{index}", ordinal=index + 1)
            for index, row in enumerate(rows)
        ]
        for task in tasks:
            assert isinstance(task, trajectory_pb2.PromptTask)
            assert task.prompt_ids == np.array([EOS], "<i4").tobytes()
            assert task.prompt_text.startswith("<eos><user>fox")
            assert task.sampling.max_tokens == 127
        await learner.client.seed("train", learner.incarnation, tasks)  # type: ignore[arg-type]  # none is refused
        world.generator("gen-1")
        batch = await learner.train(0)
        for group in batch:
            for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
                assert meta.outcome == trajectory_pb2.OUTCOME_SCORED
                assert meta.reward == meta.components["reward"] == 0.5 + meta.member
                assert (meta.metrics["turns"], meta.metrics["calls"]) == (2, 2)
                found = decode(payload)
                ids = [EOS, *found.response_ids.tolist()]
                text = tokenizer.decode(ids)
                question = f"<eos><system>I am an agent.<eot><user>{content_of(group.task)}<eot><assistant>"
                assert text.startswith(question)
                assert text.count("<user>again<eot><assistant>") == 1
                sampled = found.response_mask == 1
                expected = [log_chances[last, new] for last, new in itertools.pairwise(ids)]
                np.testing.assert_allclose(found.log_probs[sampled], np.array(expected)[sampled], atol=1e-3)
                assert np.flatnonzero(np.diff(found.response_mask)).size == 3
                assert not found.response_mask[: len(tokenizer.encode(question)) - 1].any()
        assert not (await learner.client.ledger("train")).discrepancies

        # The mesh knows where the endpoint is, and it serves others too.
        async def told() -> bool:
            return bool((await world.members())["gen-1"].endpoint)

        await eventually(told)
        url = (await world.members())["gen-1"].endpoint
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as other:
            assert [model.id async for model in other.models.list()] == ["test"]

        async def counted() -> bool:
            return await world.gauge("gen-1", "agent_episodes") >= 8

        await eventually(counted)
        assert await world.gauge("gen-1", "agent_calls") >= 16


def test_status_shows_where_endpoints_are() -> None:
    everyone = [
        membership_pb2.Member(member_id="gen-1", role=membership_pb2.ROLE_GENERATOR, endpoint="https://node:8011"),
        membership_pb2.Member(member_id="learner-1", role=membership_pb2.ROLE_LEARNER),
    ]
    shown = io.StringIO()
    Console(file=shown, width=200).print(members_table(everyone))
    assert "https://node:8011/v1" in shown.getvalue()


def content_of(task: trajectory_pb2.PromptTask) -> str:
    [content] = re.findall(r'"content": "(.*?)"', task.messages_json)
    return str(content)

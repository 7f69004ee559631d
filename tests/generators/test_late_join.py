"""Generators that come in the middle, or were away: they get the newest weights, by the shortest way."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollmesh.verification.compare import compare
from tests.generators.world import SECURITY, eventually, mesh

NEWEST = 3


def nudged(model: PreTrainedModel, version: int) -> PreTrainedModel:
    """A few weights of every tensor change, as by an optimizer's small steps in a coarse dtype."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::97] += 0.01 * version
    return model


async def test_who_comes_late_gets_all_and_who_was_away_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.generators.world.perturbed", nudged)
    settings = {"weights__transport": "grpc", "weights__encoding": "delta", "buffer__lease_s": 20.0}
    async with mesh(tmp_path, **settings) as world:
        learner = await world.learner()
        pushes = learner.publisher.pushes
        await learner.publish(0)
        away = await world.process("away")
        world.generator("here")
        await learner.swapped(2)
        full = {name: found["bytes"] for name, found in pushes.receivers().items()}
        away.send_signal(signal.SIGSTOP)
        for version in range(1, NEWEST + 1):
            await learner.publish(version)
            await learner.swapped(2 + version)
        world.generator("late")
        await learner.swapped(3 + NEWEST)
        away.send_signal(signal.SIGCONT)

        async def caught_up() -> bool:
            return pushes.receivers()["away"]["last"]["version"] == f"1:{NEWEST}"

        await eventually(caught_up)
        found = pushes.receivers()
        assert {name: one["last"]["encoding"] for name, one in found.items()} == {
            "away": "delta",
            "here": "delta",
            "late": "full",
        }
        assert found["late"]["bytes"] == full["here"]
        for name in ("away", "here"):
            assert found[name]["bytes"] - full[name] < 0.2 * full[name]
        assert pushes.summary().errors == 0
        comparison = await compare(world.address, SECURITY, timeout_s=20.0, prompt=None, tolerance=None)
        assert [verdict.member_id for verdict in comparison.verdicts] == ["away", "here", "late"]
        assert comparison.verified, comparison
        # A generator that came late continues by deltas.
        await learner.publish(NEWEST + 1)

        async def all_there() -> bool:
            return all(one["last"]["version"] == f"1:{NEWEST + 1}" for one in pushes.receivers().values())

        await eventually(all_there)
        assert pushes.receivers()["late"]["last"]["encoding"] == "delta"

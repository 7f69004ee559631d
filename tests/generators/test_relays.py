"""Generators in a mesh that fetch weights from one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generators.world import mesh


async def test_the_second_generator_fetches_from_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Bound to loopback, as all tests are, generators do not relay.
    monkeypatch.setattr("rollmesh.generators.service.is_loopback", lambda _host: False)
    async with mesh(tmp_path, weights__transport="grpc", weights__fanout=1) as world:
        learner = await world.learner()
        await learner.publish(0)
        world.generator("gen-1")
        await learner.swapped(1)
        world.generator("gen-2")
        await learner.swapped(2)
        members = await world.members()
        sources = {name: found["last"]["source"] for name, found in learner.publisher.pushes.receivers().items()}
        assert sources == {"gen-1": "", "gen-2": members["gen-1"].address}

"""The ranks of a learner: what they tell one another, and what is known of a rank that left a collective."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rollmesh.learner.engines.world import World


def test_the_error_of_a_rank_is_the_cause_where_the_others_still_wait_inside_a_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World("cpu", need_group=False)

    def time_out(_message: bytes) -> list[bytes]:
        raise dist.DistBackendError("timed out")

    monkeypatch.setattr(world, "gather_bytes", time_out)
    mistake = ValueError("shapes differ")
    with pytest.raises(dist.DistBackendError) as raised:
        world.gather_failures(mistake, "shapes differ")
    assert raised.value.__cause__ is mistake


def test_every_rank_has_the_reason_of_each() -> None:
    world = World("cpu", need_group=False)
    assert world.gather_failures(ValueError("ä"), "ä") == ["ä"]
    assert world.gather_failures(None, "") == [""]

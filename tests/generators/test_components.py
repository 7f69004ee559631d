"""The parts of a generator: the memory of its engine, and what it does at a swap."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.generators.engine_loading import kv_policy, sharing
from rollmesh.mesh.config.load import load_config


@pytest.mark.parametrize(
    ("rollout", "learner", "on_cpu", "on_cuda"),
    [
        ({}, {}, 1, 1),
        ({"replicas": 0}, {}, 1, 1),
        ({"replicas": 4}, {"devices": [0]}, 4, 1),
        ({"replicas": 4, "devices": [0, 0, 0, 1]}, {"devices": [2]}, 4, 3),
        ({"replicas": 2, "devices": [0, 1]}, {"devices": [1]}, 2, 2),
    ],
)
def test_memory_is_shared_with_those_on_the_same_device(
    rollout: dict[str, Any], learner: dict[str, Any], on_cpu: int, on_cuda: int
) -> None:
    config = load_config({"model": {"path": "m"}, "data": {"train": "t"}, "rollout": rollout, "learner": learner})
    assert (sharing(config, "cpu"), sharing(config, "cuda")) == (on_cpu, on_cuda)


def test_what_a_swap_keeps_is_chosen_for_the_engine() -> None:
    least = {"model": {"path": "m"}, "data": {"train": "t"}}
    for engine, policy in (("hf", "keep"), ("vllm", "keep"), ("sglang", "recompute")):
        chosen = {**least, "rollout": {"engine": engine}}
        assert kv_policy(load_config(chosen)) == policy
        assert kv_policy(load_config({**chosen, "weights": {"kv": "interrupt"}})) == "interrupt"

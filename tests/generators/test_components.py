"""The parts of a generator: the memory of its engine, and what it does at a swap."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.generators.engine_loading import kv_policy, release_here, sharing
from rollmesh.mesh.config.load import load_config


@pytest.mark.parametrize(
    ("replicas", "devices", "on_cpu", "on_cuda"),
    [
        (1, {}, 1, 1),
        (0, {}, 1, 1),
        (4, {"learner": [0]}, 4, 1),
        (4, {"learner": [2], "generators": [[0], [0], [0], [1]]}, 4, 3),
        (2, {"learner": [1], "generators": [[0], [1]]}, 2, 2),
    ],
)
def test_memory_is_shared_with_those_on_the_same_device(
    replicas: int, devices: dict[str, Any], on_cpu: int, on_cuda: int
) -> None:
    sections = {"rollout": {"replicas": replicas}, "placement": {"devices": devices}}
    config = load_config({"model": {"path": "m"}, "data": {"train": "t"}, **sections})
    assert (sharing(config, "cpu"), sharing(config, "cuda")) == (on_cpu, on_cuda)


def test_what_a_swap_keeps_is_chosen_for_the_engine() -> None:
    least = {"model": {"path": "m"}, "data": {"train": "t"}}
    for engine, policy in (("hf", "keep"), ("vllm", "keep"), ("sglang", "recompute")):
        chosen = {**least, "rollout": {"engine": engine}}
        assert kv_policy(load_config(chosen)) == policy
        assert kv_policy(load_config({**chosen, "weights": {"kv": "interrupt"}})) == "interrupt"
    served = {"rollout": {"engine": "sglang"}, "learner": {"lora": {"push": "served"}}}
    assert kv_policy(load_config({**least, **served})) == "keep", (
        "an adapter leaves the keys and values of others alone"
    )


@pytest.mark.parametrize(
    ("rollout", "asked", "found"),
    [
        ({"engine": "hf"}, "auto", "memory"),
        ({"engine": "vllm", "device": "cpu"}, "auto", "process"),
        ({"engine": "vllm", "device": "cpu"}, "memory", "memory"),
        ({"engine": "sglang", "device": "cpu"}, "process", "process"),
        ({"engine": "sglang", "device": "cpu", "sglang": {"address": "http://h:1"}}, "auto", "memory"),
    ],
)
def test_memory_is_given_back_in_the_way_that_works(
    rollout: dict[str, Any], asked: str, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    least = {"model": {"path": "m"}, "data": {"train": "t"}}
    config = load_config({**least, "rollout": rollout, "placement": {"mode": "collocated", "release": asked}})
    assert release_here(config) == found
    in_vain = rollout["engine"] == "vllm" and asked == "memory"
    assert ("gives nothing back" in caplog.text) == in_vain

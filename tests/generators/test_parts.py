"""The parts of a generator: the device of its engine, and what it does at a swap."""

from __future__ import annotations

import pytest

from generators.parts import device_of, kv_policy
from mesh.config.load import load_config
from mesh.errors import ConfigError


def test_the_device_is_what_rollout_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, auto in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=available: there)
        assert (device_of("auto"), device_of("cpu")) == (auto, "cpu")
    assert device_of("cuda") == "cuda"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"rollout\.device is cuda, but torch finds no CUDA device here"):
        device_of("cuda")


def test_what_a_swap_keeps_is_chosen_for_the_engine() -> None:
    least = {"model": {"path": "m"}, "data": {"train": "t"}}
    for engine, policy in (("hf", "keep"), ("vllm", "keep"), ("sglang", "recompute")):
        chosen = {**least, "rollout": {"engine": engine}}
        assert kv_policy(load_config(chosen)) == policy
        assert kv_policy(load_config({**chosen, "weights": {"kv": "interrupt"}})) == "interrupt"

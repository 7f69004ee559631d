"""The device that a setting means, and what is said where there is none."""

from __future__ import annotations

import pytest

from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.devices import choose_device, require_cuda


def test_the_device_is_what_the_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, auto in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=available: there)
        assert (choose_device("auto", "rollout.device"), choose_device("cpu", "rollout.device")) == (auto, "cpu")
    assert choose_device("cuda", "rollout.device") == "cuda"
    require_cuda("weights.transport", "nccl", instead="auto")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"rollout\.device is cuda, but torch finds no CUDA device here") as caught:
        choose_device("cuda", "rollout.device")
    assert caught.value.hint == "set rollout.device: cpu"
    with pytest.raises(ConfigError, match=r"weights\.transport is nccl"):
        require_cuda("weights.transport", "nccl", instead="auto")

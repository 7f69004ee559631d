"""The kind of device that a process computes on. torch is imported on first use."""

from __future__ import annotations

from typing import Literal

from rollmesh.mesh.config.base import DeviceName
from rollmesh.mesh.errors import ConfigError

DeviceType = Literal["cpu", "cuda"]


def has_cuda() -> bool:
    """True if this process sees a CUDA device that its torch can use."""
    import torch

    return torch.cuda.is_available()


def require_cuda(setting: str, value: str, *, instead: str) -> None:
    """Refuses a setting that demands CUDA on a host without it.

    Args:
        setting: name of the key.
        value: of the key.
        instead: what to set it to without a device.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not has_cuda():
        raise ConfigError(
            f"{setting} is {value}, but torch finds no CUDA device here", hint=f"set {setting}: {instead}"
        )


def choose_device(device: DeviceName, setting: str) -> DeviceType:
    """The kind of device that a setting means here.

    Args:
        device: value of the setting; `auto`: CUDA where there is a device.
        setting: its key.

    Raises:
        ConfigError: CUDA is asked for and absent.
    """
    if device == "cuda":
        require_cuda(setting, device, instead="cpu")
    return "cuda" if device != "cpu" and has_cuda() else "cpu"

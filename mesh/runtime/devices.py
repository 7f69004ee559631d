"""The kind of device that a process computes on. torch is imported on first use."""

from __future__ import annotations

from typing import Literal

from rollmesh.mesh.config.base import DeviceName
from rollmesh.mesh.errors import ConfigError

DeviceType = Literal["cpu", "cuda"]


def has_cuda() -> bool:
    """Whether this process sees a CUDA device that its torch can use."""
    import torch

    return torch.cuda.is_available()


def require_cuda(setting: str, value: str, *, instead: str) -> None:
    """Asks for a device that a setting demands.

    Args:
        setting: name of the key.
        value: of the key.
        instead: what to set it to without a device.

    Raises:
        ConfigError: there is none.
    """
    if not has_cuda():
        raise ConfigError(
            f"{setting} is {value}, but torch finds no CUDA device here", hint=f"set {setting}: {instead}"
        )


def choose_device(wanted: DeviceName, setting: str) -> DeviceType:
    """The kind of device that a setting means here.

    Args:
        wanted: value of the setting; `auto`: CUDA where there is a device.
        setting: its key.

    Raises:
        ConfigError: CUDA is asked for and absent.
    """
    if wanted == "cuda":
        require_cuda(setting, wanted, instead="cpu")
    return "cuda" if wanted != "cpu" and has_cuda() else "cpu"

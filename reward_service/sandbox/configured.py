"""The executor that a configuration asks for."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence

from rollmesh.mesh.config.scorers.isolation import IsolationSection
from rollmesh.reward_service.sandbox.executor import Sandbox
from rollmesh.reward_service.sandbox.interface import Executor
from rollmesh.reward_service.sandbox.languages.toolchains import readable
from rollmesh.reward_service.sandbox.plugins.bubblewrap import Bubblewrap
from rollmesh.reward_service.sandbox.plugins.commands import CommandExecutor
from rollmesh.reward_service.sandbox.plugins.gvisor import Gvisor
from rollmesh.reward_service.sandbox.plugins.remote import RemoteSandbox
from rollmesh.reward_service.sandbox.plugins.sandbox_fusion import SandboxFusion
from rollmesh.reward_service.sandbox.zygote_process import Runtime, UnavailableError

log = logging.getLogger(__name__)
_COMMANDS: Mapping[str, tuple[type[CommandExecutor], str, str]] = {
    "bubblewrap": (Bubblewrap, "bwrap", "bubblewrap"),
    "gvisor": (Gvisor, "runsc", "runsc"),
}
"""Plug-ins that confine by a program of this host: class, program, package."""


async def open_executor(isolation: IsolationSection, *, preload: Sequence[str] = ()) -> Executor:
    """Opens the executor of a service, on the highest rung that the host allows or by the plug-in that is named.

    Args:
        isolation: of the configuration.
        preload: modules of the standard library that most Python programs will import.

    Raises:
        UnavailableError: the host does not allow the rung that is required, or the plug-in does not work; the message
            says what is missing.
        ConfigError: a key that cannot be read, or would be sent in clear.
    """
    executor = await _opened(isolation, preload)
    log.info("isolation of programs: %s", executor.describe())
    return executor


async def in_force(isolation: IsolationSection) -> Executor:
    """The executor of a configuration for what it says of itself: it is opened, and closed again.

    Raises:
        UnavailableError, ConfigError: as `open_executor`.
    """
    executor = await open_executor(isolation)
    await executor.close()
    return executor


async def _opened(isolation: IsolationSection, preload: Sequence[str]) -> Executor:
    size, url = isolation.concurrency or 0, isolation.url or ""
    paths = readable(isolation.toolchains)
    match isolation.plugin:
        case "bubblewrap" | "gvisor" as name:
            plugin, command, package = _COMMANDS[name]
            program = str(isolation.program or shutil.which(command) or "")
            if not program:
                raise UnavailableError(f"there is no {command}", hint=f"install the package {package}")
            confining = plugin(program, paths, size)
            await confining.try_out()
            return confining
        case "sandbox_fusion":
            return SandboxFusion(url, isolation.key_file, size, ca_file=isolation.ca_file)
        case "remote":
            return RemoteSandbox(url, isolation.key_file, size, ca_file=isolation.ca_file)
    return await Sandbox.open(require=isolation.require, size=size, runtime=Runtime(readable=paths, preload=preload))

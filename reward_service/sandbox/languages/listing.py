"""Languages of a host in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollmesh.reward_service.sandbox.interface import Executor
from rollmesh.reward_service.sandbox.languages.building import Builder
from rollmesh.reward_service.sandbox.languages.table import LANGUAGES


async def listing(executor: Executor, folders: Sequence[Path]) -> list[str]:
    """A line for the isolation in force, and one for each language: its version, or what it lacks.

    Args:
        executor: of the host.
        folders: those of `reward.isolation.toolchains`.
    """
    builder = Builder(executor, folders)
    found = [await builder.toolchain(language.name) for language in LANGUAGES]
    lines = [executor.describe()]
    for toolchain in found:
        name = toolchain.language.name
        if toolchain.missing:
            lines.append(f"{name:<12} no: {toolchain.missing}; {toolchain.remedy}")
        else:
            lines.append(f"{name:<12} rung {executor.rung}, {toolchain.version}")
    return lines

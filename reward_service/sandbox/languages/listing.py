"""Languages of a host in words."""

from __future__ import annotations

from rollmesh.mesh.config.scorers.isolation import IsolationSection
from rollmesh.reward_service.sandbox.configured import open_executor
from rollmesh.reward_service.sandbox.languages.building import Builder
from rollmesh.reward_service.sandbox.languages.table import LANGUAGES


async def listing(isolation: IsolationSection) -> list[str]:
    """A line for the isolation in force, and one for each language: its version, or what it lacks.

    Raises:
        UnavailableError: no program can be confined here.
    """
    executor = await open_executor(isolation)
    try:
        builder = Builder(executor, isolation.toolchains)
        found = [await builder.toolchain(language.name) for language in LANGUAGES]
    finally:
        await executor.close()
    lines = [executor.describe()]
    for toolchain in found:
        name = toolchain.language.name
        if toolchain.missing:
            lines.append(f"{name:<12} no: {toolchain.missing}; {toolchain.remedy}")
        else:
            lines.append(f"{name:<12} rung {executor.rung}, {toolchain.version}")
    return lines

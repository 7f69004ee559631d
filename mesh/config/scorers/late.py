"""The configuration of rewards that are known only later."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rollmesh.mesh.config.base import PositiveFloat, Section


class LateSection(Section):
    store: Path | None = Field(
        None,
        description="A file for rewards that are delivered later, on a local disk of the host that scores. None: no "
        "function may return `later(...)`. See docs/reward-models.md.",
    )
    timeout_s: PositiveFloat = Field(
        86400.0, description="Seconds after which a reward that was not delivered ends as the error `late`."
    )
    ask_s: PositiveFloat = Field(5.0, le=600, description="Seconds between two looks for a delivered reward.")

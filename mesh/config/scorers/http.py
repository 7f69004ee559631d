"""The configuration of the HTTP/JSON form of a reward service."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rollmesh.mesh.config.base import Section


class HttpSection(Section):
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port at which a reward service answers over HTTP too, in JSON; 0: a free one. None: it does not. "
        "See docs/reward-http.md.",
    )
    key_file: Path | None = Field(
        None,
        description="A file with the key (bearer token) that callers over HTTP must send. It has to be on the host of "
        "the reward service. Off loopback a key is needed.",
    )

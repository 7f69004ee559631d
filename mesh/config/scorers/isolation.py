"""The configuration of isolation: where programs that a model has written are run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollmesh.mesh.config.base import PositiveInt, Section, http_parts

_ON_THIS_HOST = ("bubblewrap", "gvisor")
_OVER_HTTP = ("sandbox_fusion", "remote")


class IsolationSection(Section):
    require: int = Field(
        2,
        ge=2,
        le=4,
        description="The least rung on which programs may be run; a host that has none refuses the scorers that need "
        "it. See docs/isolation.md.",
    )
    plugin: Literal["none", "bubblewrap", "gvisor", "sandbox_fusion", "remote"] = Field(
        "none",
        description="Rung 4: programs are run by `bwrap`, by gVisor's `runsc`, by a SandboxFusion server, or by the "
        "sandbox of another machine (`rollmesh reward sandbox`). `none`: the highest rung of this host.",
    )
    program: Path | None = Field(None, description="Path of `bwrap` or `runsc`; none: as it is found.")
    url: str | None = Field(None, description="`https://HOST:PORT` of `sandbox_fusion` or `remote`.")
    key_file: Path | None = Field(
        None, description="A file with the key that is sent to `url` as a bearer token; needed by `remote`."
    )
    ca_file: Path | None = Field(
        None, description="Authority of the certificate of `url`, PEM; none: those that the host trusts."
    )
    toolchains: list[Path] = Field(
        default_factory=list,
        description="Folders with compilers and interpreters in `bin`, besides the system's. Every account has to be "
        "able to read them, and programs read them too.",
    )
    concurrency: PositiveInt | None = Field(
        None, description="Programs that run at a time, per service. None: as many as there are cores."
    )

    @field_validator("url")
    @classmethod
    def _is_endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = http_parts(value)
        if parts is None or parts.query or parts.fragment or parts.username is not None:
            raise ValueError("needs https://HOST:PORT or http://HOST:PORT, without login and options")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _is_consistent(self) -> IsolationSection:
        if self.require > 3 and self.plugin == "none":
            raise ValueError("rung 4 needs reward.isolation.plugin")
        if (self.url is not None) != (self.plugin in _OVER_HTTP):
            raise ValueError(f"a url belongs to {' and '.join(_OVER_HTTP)}, and they need one")
        if self.url is None and (self.key_file is not None or self.ca_file is not None):
            raise ValueError("a key and an authority belong to a url, and there is none")
        if self.plugin == "remote" and self.key_file is None:
            raise ValueError("the plugin `remote` needs reward.isolation.key_file")
        if self.program is not None and self.plugin not in _ON_THIS_HOST:
            raise ValueError(f"a program belongs to the plug-ins {' and '.join(_ON_THIS_HOST)}")
        return self


def _from_word(value: Any) -> Any:
    if isinstance(value, str | int | float) and value != "auto":
        raise ValueError("needs `auto` or keys of its own, as reward.isolation.require=3 (2 to 4)")
    return {} if value == "auto" else value


# `auto`, or the section.
Isolation = Annotated[IsolationSection, BeforeValidator(_from_word)]

"""Keys of the configuration, for tests of what names them."""

from __future__ import annotations

from typing import Any

from rollmesh.mesh.config.base import section_of
from rollmesh.mesh.config.models import Config


def is_key(name: str) -> bool:
    """True for a key, dotted, or a section."""
    section: Any = Config
    for part in name.split("."):
        field = getattr(section, "model_fields", {}).get(part)
        if field is None:
            return False
        section = section_of(field.annotation)
    return True

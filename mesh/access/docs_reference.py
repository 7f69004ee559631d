"""The table of verbs for the documentation: `python -m rollmesh.mesh.access.docs_reference docs/security.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from rollmesh.mesh.access.permissions import VERBS
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.text import with_part

_BEGIN, _END = "<!-- verbs: written by `make docs` -->", "<!-- end of verbs -->"


def reference() -> str:
    """A table of the roles that may call each verb."""
    rows = [
        f"| `{method.removeprefix('/rollmesh.v1.')}` | {', '.join(role for role in Role if role in allowed)} |"
        for method, allowed in VERBS.items()
    ]
    return "\n".join(["| verb | roles |", "|---|---|", *rows]) + "\n"


def with_reference(page: str) -> str:
    """A page with the table between its marks."""
    return with_part(page, _BEGIN, _END, reference())


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_reference(path.read_text(encoding="utf-8")), encoding="utf-8")

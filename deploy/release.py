"""A release needs more than tests: a tag that is the version, and changes that are written down and dated.

python -m deploy.release v1.2.3
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def faults(tag: str, version: str, changes: str) -> list[str]:
    """Reasons why this tag is no release of this version.

    Args:
        version: as pyproject.toml has it.
        changes: the text of CHANGELOG.md.
    """
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, but pyproject.toml says {version}: set the version, or tag v{version}")
    heading = re.search(rf"^## {re.escape(version)} \((.*)\)$", changes, re.MULTILINE)
    if heading is None:
        found.append(f"CHANGELOG.md has no section `## {version} (DATE)`: write what changed")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        found.append(f"CHANGELOG.md says {version} is {heading[1]}: write the date, as 2030-12-31")
    return found


def main() -> int:
    """Prints what is wrong; the exit code is 1 then."""
    if len(sys.argv) != 2:
        print("usage: python -m deploy.release TAG", file=sys.stderr)
        return 2
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    found = faults(sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    print("\n".join(found) or f"{version} can be released")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

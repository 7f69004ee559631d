"""Writes the generated sections of a page: `python -m rollmesh.learner.docs_reference PAGE --exceptions FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.learner.algorithms.docs_reference import fill, markdown_table, sections
from rollmesh.learner.metrics.catalogue import catalogue_markdown


def page(text: str, exceptions: Sequence[Mapping[str, Any]]) -> str:
    """The page with its generated sections as they should be.

    Args:
        text: the page, with markers.
        exceptions: recorded cases in which ours differs on purpose: id, outputs, reason.
    """
    return fill(text, {**sections(), "exceptions": _exceptions(exceptions), "metrics": catalogue_markdown()})


def _exceptions(exceptions: Sequence[Mapping[str, Any]]) -> str:
    if not exceptions:
        return "None: every recorded case is met."
    rows = [
        (f"`{entry['id']}`", ", ".join(f"`{name}`" for name in entry["outputs"]), str(entry["reason"]))
        for entry in exceptions
    ]
    return markdown_table(("case", "outputs", "why ours differs"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m rollmesh.learner.docs_reference", description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--exceptions", type=Path, required=True)
    options = parser.parse_args(arguments)
    exceptions = json.loads(options.exceptions.read_text(encoding="utf-8"))
    options.page.write_text(page(options.page.read_text(encoding="utf-8"), exceptions), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

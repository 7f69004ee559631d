"""The command line of scripts whose table stands in a page of the documentation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.common import HelpFormatter
from rollmesh.learner.algorithms.docs_reference import fill


def fill_page(arguments: Sequence[str] | None, description: str | None, name: str, table: Callable[[], str]) -> None:
    """Writes a table between its markers in the page that the command line names.

    Args:
        arguments: of the command line; None: those of this process.
        description: of the script.
        name: of the markers.
        table: computes the table, as Markdown.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    parser.add_argument("page", type=Path, help="page with the markers of the table")
    page: Path = parser.parse_args(arguments).page
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    page.write_text(fill(page.read_text(encoding="utf-8"), {name: table()}), encoding="utf-8")

"""Options that several scripts of this folder have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.buffer.reverb import VARIABLE


def add_reverb_option(parser: argparse.ArgumentParser) -> None:
    """Adds the interpreter that has Reverb: as an option, or by the environment."""
    given = os.environ.get(VARIABLE)
    parser.add_argument(
        "--reverb-python", type=Path, default=Path(given) if given else None, required=given is None,
        help=f"interpreter with dm-reverb (or {VARIABLE})",
    )  # fmt: skip


def add_cell_options(parser: argparse.ArgumentParser, *, repetitions: int, tokens: Sequence[int]) -> None:
    """Adds the results' file, and the cells that are measured.

    Args:
        repetitions: of each cell, by default.
        tokens: response tokens of the cells, by default.
    """
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time of a cell")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(tokens), help="response tokens")
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 4])

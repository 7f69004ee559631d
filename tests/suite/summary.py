"""`python -m tests.suite.summary [--no-budget] FILE...`: the account of a whole run of the suite, and its budget.

Exits with 1 if a folder has overspent its budget.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.suite.budget import overspent, read_budget
from tests.suite.results import Results

_SHOWN = 24
_COLUMNS = 3


def account(results: Results) -> Iterator[str]:
    """The account in lines."""
    folders = sorted(results.folders.items(), key=lambda found: -found[1].cpu_s)[:_SHOWN]
    yield "CPU seconds by folder:"
    for first in range(0, len(folders), _COLUMNS):
        row = folders[first : first + _COLUMNS]
        yield "  ".join(f"{usage.cpu_s:6.1f}  {name.removeprefix('tests/'):34}" for name, usage in row).rstrip()
    yield from _reasons("skipped", results.skipped)
    yield from _reasons("not run", results.left_out)
    counts = [
        f"{results.outcomes['passed']} passed",
        f"{results.outcomes['failed'] + results.outcomes['error']} failed",
    ]
    if results.skipped:
        counts.append(f"{results.skipped.total()} skipped")
    yield f"tests: {', '.join(counts)}"
    before = f"{results.collection_cpu_s:.0f} of them before the first test"
    starts = f"{results.starts_cpu_s:.0f} for starts of what tests share"
    yield f"{results.seconds / 60:.1f} minutes, {results.cpu_s:.0f} CPU seconds, {before}, {starts}"


def _reasons(title: str, by_reason: Counter[str]) -> Iterator[str]:
    for reason, count in by_reason.most_common():
        yield f"{title}: {count} ({reason})"


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    """Prints the account; see the module."""
    results = Results.read(Path(item) for item in arguments if not item.startswith("--"))
    wrong = [] if "--no-budget" in arguments else overspent(results, read_budget())
    print("\n".join((*account(results), *wrong)))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

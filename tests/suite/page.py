"""`python -m tests.suite.page FILE... > docs/testing.md`: the page about the suite, after a run of all that passed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.repository import REPOSITORY
from tests.suite.budget import read_budget
from tests.suite.results import Results

_TEXT = """\
# The test suite

For contributors: what the tests of Rollmesh cost, and when all of them last passed. `make test-all` writes this page.

| command | what it proves | time on two cores |
|---|---|---|
| `make test` | every promise once; lint and types | ten minutes |
| `make test ONLY=buffer` | the same, of a package and of all that depends on it | by package |
| `make test-fast` | what needs no process and no engine | a minute |
| `make test-all` | every cell of every product, long chaos, soaks | an hour |

In `make test` a product of engines, layouts, models and the like is a covering array: each pair of values occurs
(`tests/suite/tiers.py`). Tests marked `exhaustive` run in `make test-all` alone, and each has a sibling in `make test`.
A folder that uses half as much again as its CPU seconds in `tests/suite/budget.toml` fails the run.
`python -m tests.suite.mutants` draws changes of the product that tests must notice.

## All tests
"""
_NEVER = "`make test-all` has not passed as a whole yet.\n"
_PASSED = """\
{commit} passed `make test-all` on {day}: {passed} tests in {minutes:.0f} minutes and {cpu_s:.0f} CPU seconds{left_out}.

| folder | tests | CPU seconds | budget of `make test` |
|---|---|---|---|
{rows}
"""


def page(results: Results, *, commit: str, day: str) -> str:
    """The page in Markdown, from results that may be empty."""
    if not results.tests:
        return _TEXT + _NEVER
    budget = read_budget()
    rows = [
        f"| `{name}` | {usage.tests} | {usage.cpu_s:.0f} | {budget.get(name, 0):g} |"
        for name, usage in sorted(results.folders.items())
    ]
    left_out = "".join(f"; {count} {reason}" for reason, count in results.left_out.items())
    return _TEXT + _PASSED.format(
        commit=commit,
        day=day,
        passed=results.outcomes["passed"],
        minutes=results.seconds / 60,
        cpu_s=results.cpu_s,
        left_out=left_out,
        rows="\n".join(rows),
    )


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    """Prints the page."""
    commit = subprocess.run(
        ["git", "-C", str(REPOSITORY), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
    )
    results = Results.read(map(Path, arguments))
    print(page(results, commit=f"Commit {commit.stdout.strip()}", day=time.strftime("%Y-%m-%d")), end="")


if __name__ == "__main__":
    main()

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

For contributors: how the tests of Rollmesh are divided, and when all of them last passed. `make test-all` writes this
page; [CONTRIBUTING.md](../CONTRIBUTING.md) has the commands.

In `make test` a product of engines, layouts, models and the like is a covering array: each pair of values occurs
(`tests/suite/tiers.py`). Tests marked `exhaustive` run in `make test-all` alone, and each has a sibling in `make test`.
`tests/suite/budget.toml` has the CPU seconds that each folder may use; `make test` fails above half as much again, or
10 seconds more in a small folder. `python -m tests.suite.mutants` samples mutants of the product that the tests must
kill.

## All tests
"""
_NEVER = "`make test-all` has not passed as a whole yet.\n"
_PASSED = """\
{commit} passed `make test-all` on {day}: {passed} tests in {minutes:.0f} minutes and {cpu_s:.0f} CPU seconds. Not run:

{left_out}

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
    reasons = [*results.skipped.items(), *results.left_out.items()]
    # Without the places of one machine.
    left_out = "\n".join(f"- {count}: {reason.partition(' in /')[0]}" for reason, count in reasons)
    return _TEXT + _PASSED.format(
        commit=commit,
        day=day,
        passed=results.outcomes["passed"],
        minutes=results.seconds / 60,
        cpu_s=results.cpu_s,
        left_out=left_out or "- none",
        rows="\n".join(rows),
    )


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    """Prints the page."""
    results = Results.read(map(Path, arguments))
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":!docs/testing.md")
    commit = f"{'A tree with changes to commit' if changes else 'Commit'} {_git('rev-parse', '--short=8', 'HEAD')}"
    print(page(results, commit=commit, day=time.strftime("%Y-%m-%d")), end="")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()

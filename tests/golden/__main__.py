"""`python -m tests.golden MANIFEST [--json OUT]`: compares every case, prints a table by family."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.golden.case import read_manifest
from tests.golden.compare import Verdict, check, read_exceptions


def main() -> int:
    """Exit status: 0 where every case passes or is listed in `exceptions.json`, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("manifest", type=Path, help="manifest.json; the files of the cases lie beside it")
    parser.add_argument("--json", type=Path, help="write one record per case here")
    parser.add_argument("--only", default="", help="cases whose id contains this")
    arguments = parser.parse_args()
    exceptions = read_exceptions()
    verdicts = [check(case, exceptions) for case in read_manifest(arguments.manifest) if arguments.only in case.id]
    _print(verdicts)
    if arguments.json is not None:
        records = [
            {
                "id": v.case.id,
                "status": v.status,
                "mismatches": v.mismatches,
                "reasons": v.reasons,
                "unrecorded": v.unrecorded,
            }
            for v in verdicts
        ]
        arguments.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return int(not verdicts or any(verdict.status == "FAILED" for verdict in verdicts))


def _print(verdicts: list[Verdict]) -> None:
    console = Console(width=140)
    table = Table("family", "cases", "passed", "differs on purpose", "FAILED")
    by_family: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        by_family.setdefault(verdict.case.key[0], Counter())[verdict.status] += 1
    for family, statuses in sorted(by_family.items()):
        numbers = [statuses[status] for status in ("passed", "differs on purpose", "FAILED")]
        table.add_row(family, *map(str, [sum(numbers), *numbers]))
    for verdict in verdicts:
        for name, wrong in verdict.mismatches.items():
            console.print(f"[red]FAILED[/red] {verdict.case.id}: {name}: {wrong}", highlight=False)
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())

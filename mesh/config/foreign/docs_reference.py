"""The tables for the documentation: `python -m rollmesh.mesh.config.foreign.docs_reference docs/coming-from.md`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from rollmesh.mesh.config.foreign.tables import ForeignKey, Row, Table, tables
from rollmesh.mesh.text import with_part


def with_tables(page: str) -> str:
    """A page with each table between its marks."""
    for table in (*tables("run"), *tables("trainer")):
        begin = f"<!-- {table.title}: written by `make docs` -->"
        if begin not in page:
            raise ValueError(f"the page has no place for the table {table.title!r}: {begin} ... <!-- end -->")
        page = with_part(page, begin, "<!-- end -->", _markdown(table))
    return page


def _markdown(table: Table) -> str:
    rows = [f"| {row.said or _keys(row, table.prefix)} | {row.ours} |" for row in table.rows]
    return "\n".join([f"| {table.head} | Rollmesh |", "|---|---|", *rows]) + "\n"


def _keys(row: Row, prefix: str) -> str:
    """Their keys; of several with the same long beginning it is written once."""
    shown = []
    for parent, keys in groupby(row.theirs, key=lambda key: key.name.removeprefix(prefix).rpartition(".")[0]):
        for number, key in enumerate(keys):
            name = key.name.removeprefix(prefix)
            shown.append(_code(name.removeprefix(parent) if number and "." in parent else name, key))
    return ", ".join(shown)


def _code(name: str, key: ForeignKey) -> str:
    first, *others = key.values or ("",)
    return " or ".join([f"`{name}: {first}`" if first else f"`{name}`", *(f"`{value}`" for value in others)])


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")

"""Runs SQL: standard input makes the tables, `query.sql` is the program, and rows go out as from the `sqlite3` shell.

It is a job's file: no other module imports it.
"""

import sqlite3
import sys


def main() -> int:
    """Executes both texts in a database in memory; 1 after an error."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.executescript(sys.stdin.read())
        with open("query.sql", encoding="utf-8") as file:
            for statement in statements(file.read()):
                for row in connection.execute(statement):
                    print("|".join("" if value is None else str(value) for value in row))  # noqa: T201
    except (sqlite3.Error, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def statements(text: str) -> list[str]:
    """The statements of a text."""
    found, begun = [], ""
    for part in text.split(";"):
        begun += part + ";"
        if sqlite3.complete_statement(begun):
            found.append(begun)
            begun = ""
    return [*found, begun] if begun else found


if __name__ == "__main__":
    sys.exit(main())

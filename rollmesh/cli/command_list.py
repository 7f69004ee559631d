"""The list of commands in `--help`: the whole first sentence of each, in as many lines as it takes."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class CommandList(TyperGroup):
    """A group whose help cuts no sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the names of the commands, with their first sentences."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                text = " ".join((command.help or "").split("\n\n")[0].split())
                sentence, _, _ = text.partition(". ")
                rows.append((name, f"{sentence.removesuffix('.')}."))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

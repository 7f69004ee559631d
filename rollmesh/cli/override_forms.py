"""Overrides as people type them: `--learner.steps=5`, `--learner.steps 5` and `learner.steps=5`, anywhere.

The command's own options and arguments stay where they are. All others come last, as `mesh.config.parse_overrides`
reads them; that also says what is wrong with other forms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from rollmesh.cli.options import OVERRIDES

# A key without its value. Top-level keys have no dot, so that any other word could be one: `--algorithm grpo`.
_KEY = re.compile(r"--[A-Za-z_][\w-]*(\.[\w-]+)*")
# Hydra's marks are no part of a file's name either.
_BARE = re.compile(r"[+~]{0,2}[A-Za-z_][\w-]*(\.[\w-]+)*=.*|~[A-Za-z_][\w-]*(\.[\w-]+)*", re.DOTALL)


class OverridesCommand(TyperCommand):
    """A command whose unknown options are overrides."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [option for option in self.get_params(ctx) if isinstance(option, TyperOption)]
        own = {name: bool(option.is_flag or option.count) for option in options for name in option.opts}
        own |= dict.fromkeys(self.get_help_option_names(ctx), True)
        return super().parse_args(ctx, arranged(args, own))


def arranged(arguments: Sequence[str], own: dict[str, bool]) -> list[str]:
    """The arguments with all overrides at the end, each in one piece.

    Args:
        arguments: as typed.
        own: options of the command, each with True where it takes no value.
    """
    mine, overrides = [], []
    waiting = list(arguments)
    while waiting:
        item = waiting.pop(0)
        if item.partition("=")[0] in own:
            mine.append(item)
            if waiting and "=" not in item and not own[item]:
                mine.append(waiting.pop(0))
        elif _KEY.fullmatch(item) and waiting and not waiting[0].startswith("--"):
            overrides.append(f"{item}={waiting.pop(0)}")
        elif item.startswith("--") or _BARE.fullmatch(item):
            overrides.append(item)
        else:
            mine.append(item)
    return [*mine, *overrides]


def accept_overrides(app: typer.Typer) -> None:
    """Has every command that takes overrides read them in all forms, those of groups too."""
    for command in app.registered_commands:
        if command.context_settings is OVERRIDES:
            command.cls = OverridesCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            accept_overrides(group.typer_instance)

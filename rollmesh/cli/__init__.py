"""The `rollmesh` command. Nothing heavy is imported before a command that needs it runs."""

from rollmesh.cli.app import main

__all__ = ["main"]

"""The command, for the server of forked processes: each of them is one."""

from __future__ import annotations

from rollmesh.cli.app import app

TREE = app.tree

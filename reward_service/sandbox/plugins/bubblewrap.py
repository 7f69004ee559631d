"""Bubblewrap: namespaces made by `bwrap`, with the filter of system calls of rung 3. Source: bwrap(1)."""

from __future__ import annotations

import os

from rollmesh.reward_service.sandbox import linux, seccomp
from rollmesh.reward_service.sandbox.plugins.commands import FOLDER, SHOWN, CommandExecutor, Confined
from rollmesh.reward_service.sandbox.plugins.execution import Executed, execute

# The shell needs children, and to be told apart from its program.
_PROFILE = seccomp.Profile(writes=True, children=True, executes=True, runtime=True)


class Bubblewrap(CommandExecutor):
    """Runs programs by `bwrap`."""

    def describe(self) -> str:
        """See `Executor.describe`."""
        return f"rung 4: {self.program} (bubblewrap)"

    async def _execute(self, confined: Confined, stdin: bytes, most: int, wall_s: float) -> Executed:
        rules = os.memfd_create("seccomp")
        try:
            os.write(rules, seccomp.filter_program(_PROFILE, linux.MACHINE, seccomp.ANY_PROCESS))
            os.lseek(rules, 0, os.SEEK_SET)
            argv = [self.program, *_arguments(confined), "--seccomp", str(rules), "--", *confined.argv]
            return await execute(argv, stdin, most, wall_s, pass_fds=[rules])
        finally:
            os.close(rules)


def _arguments(confined: Confined) -> list[str]:
    shown = []
    for path in confined.readable:
        link = os.path.islink(path)
        shown += ["--symlink", os.readlink(path), path] if link else ["--ro-bind", path, path]
    variables = [word for name, value in confined.environment.items() for word in ("--setenv", name, value)]
    return [
        *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--hostname", "sandbox", "--uid", "1000", "--gid", "1000", "--clearenv"),
        *variables,
        *shown,
        *("--dev", "/dev", "--ro-bind", str(confined.files), SHOWN),
        *("--size", str(confined.disk), "--tmpfs", FOLDER, "--remount-ro", "/", "--chdir", "/"),
    ]

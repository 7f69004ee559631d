"""gVisor: a kernel of its own between programs and the host's, by `runsc` without root. Source: OCI runtime 1.0."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from rollmesh.reward_service.sandbox.plugins.commands import FOLDER, SHOWN, CommandExecutor, Confined
from rollmesh.reward_service.sandbox.plugins.execution import Executed, execute
from rollmesh.reward_service.sandbox.zygote import ORDINARY_USER

_OPTIONS = ("--rootless", "--network=none", "--ignore-cgroups")
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount")


class Gvisor(CommandExecutor):
    """Runs programs by `runsc`."""

    def describe(self) -> str:
        """See `Executor.describe`."""
        return f"rung 4: {self.program} (gVisor)"

    async def _execute(self, confined: Confined, stdin: bytes, most: int, wall_s: float) -> Executed:
        bundle, state = confined.files.parent / "bundle", confined.files.parent / "state"
        try:
            _make_bundle(bundle, confined)
            state.mkdir(mode=0o700)
            if os.geteuid() == 0:
                os.chown(state, ORDINARY_USER, ORDINARY_USER)
            argv = [self.program, *_OPTIONS, f"--root={state}", "run", f"--bundle={bundle}", "program"]
            return await execute(argv, stdin, most, wall_s)
        finally:
            shutil.rmtree(state, ignore_errors=True)
            shutil.rmtree(bundle, ignore_errors=True)


def _make_bundle(bundle: Path, confined: Confined) -> None:
    """Writes a root with nothing but places for what is shown in it, and the container's description."""
    root = bundle / "rootfs"
    links = {path: os.readlink(path) for path in confined.readable if os.path.islink(path)}
    shown = {path: path for path in confined.readable if path not in links} | {SHOWN: str(confined.files)}
    for place in (*shown, FOLDER, "/proc"):
        inside = root / place.lstrip("/")
        if os.path.isfile(shown.get(place, "")):
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
        else:
            inside.mkdir(parents=True, exist_ok=True)
    for path, target in links.items():
        (root / path.lstrip("/")).symlink_to(target)
    (bundle / "config.json").write_text(json.dumps(_container(confined, shown)), encoding="utf-8")


def _container(confined: Confined, shown: dict[str, str]) -> dict[str, Any]:
    binds = [
        {"destination": place, "type": "bind", "source": source, "options": ["rbind", "ro"]}
        for place, source in shown.items()
    ]
    work = {
        "destination": FOLDER,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": [f"size={confined.disk}", "mode=1777"],
    }
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 1000, "gid": 1000},
            "args": list(confined.argv),
            "env": [f"{name}={value}" for name, value in confined.environment.items()],
            "cwd": "/",
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "sandbox",
        "mounts": [*binds, {"destination": "/proc", "type": "proc", "source": "proc"}, work],
        "linux": {"namespaces": [{"type": name} for name in _NAMESPACES]},
    }

"""`python -m examples.quickstart [FOLDER]`: runs every command of the quickstart, in an empty folder.

It ends with an error where a command does, or where `rollmesh init` writes another file than the page shows. Machines
with CUDA devices get other settings, so it is for those without.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from examples.quickstart.page import commands, configuration, reward

_ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Runs the page."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise SystemExit(f"{folder} is not empty")
        (folder / "rewards.py").write_text(reward(), encoding="utf-8")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": ""}
        for command in commands():
            print(f"$ {command}", flush=True)
            began = time.monotonic()
            subprocess.run(command, shell=True, check=True, cwd=folder, env=environment)
            print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
            if command.startswith("rollmesh init") and (folder / "cfg.yaml").read_text() != configuration():
                raise SystemExit(f"{folder / 'cfg.yaml'} differs from the page")


if __name__ == "__main__":
    main()

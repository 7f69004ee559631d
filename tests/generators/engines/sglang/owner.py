"""A process that owns a server of SGLang, as a generator does: says where it is, and keeps it until its input ends.

python -m tests.generators.engines.sglang.owner MODEL_FOLDER DEVICE RANK SECTION
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rollmesh.generators.engines.sglang.engine import SglangEngine
from tests.generators.engines.collector import Collector
from tests.generators.engines.sglang.server import START_S, settings


def main(folder: Path, device: str, rank: int, section: dict[str, Any]) -> None:
    """Until standard input ends."""
    engine = SglangEngine.from_folder(folder, settings(device, rank, **section), Collector(START_S))
    engine.start()
    try:
        engine._inflight.wait_until_up()
        backend: Any = engine._backend
        sys.stdout.write(f"{backend._client.address} {backend._server.process.scratch}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        engine.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))

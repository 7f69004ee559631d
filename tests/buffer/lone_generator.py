"""A generator as a process of its own, which takes two groups and never finishes them; its argument is the front."""

from __future__ import annotations

import asyncio
import sys

from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.buffer.mesh_fixture import Generator


async def main() -> None:
    """Says when it is ready, and what it was granted."""
    generator = Generator(sys.argv[1], "victim")
    await generator.agent.start()
    stream = generator.admission()
    stream.update(2, PolicyVersion(1, 0), outstanding=0)
    print("ready", flush=True)
    async for grant in stream:
        print(grant.group_id, flush=True)


if __name__ == "__main__":
    asyncio.run(main())

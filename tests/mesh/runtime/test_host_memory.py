"""Free memory of a host and of a container, and folders whose files take it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rollmesh.mesh.runtime import host_memory
from rollmesh.mesh.runtime.host_memory import free_host_bytes, is_in_memory


@pytest.mark.parametrize(
    ("limit", "used", "cached"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_may_have_less_memory_than_its_host(
    limit: str, used: str, cached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_GROUP", tmp_path)
    host = psutil.virtual_memory().total
    assert 4000 < free_host_bytes() <= host, "there is no container"
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    for name, value in ((limit, 5000), (used, 3000)):
        (tmp_path / name).write_text(f"{value}\n")
    (tmp_path / used).with_name("memory.stat").write_text(f"anon 100\n{cached} 500\n")
    assert free_host_bytes() == 2500, "files that can be dropped are as good as free"
    (tmp_path / used).write_text("6000\n")
    assert free_host_bytes() == 0
    (tmp_path / limit).write_text("max\n")
    assert free_host_bytes() > 4000


def test_files_that_are_memory_are_known(tmp_path: Path) -> None:
    assert not is_in_memory(tmp_path / "not" / "made")
    if Path("/dev/shm").is_mount():
        assert is_in_memory(Path("/dev/shm/not/made"))

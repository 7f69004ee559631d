"""The contents of a wheel; that it runs among other modules: test_other_models.py."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tests.integration.wheel import NAMES, build


def test_it_holds_one_package(tmp_path: Path) -> None:
    with zipfile.ZipFile(build(tmp_path)) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"rollmesh"}
    for part in NAMES[:6]:
        assert f"rollmesh/{part}/__init__.py" in names

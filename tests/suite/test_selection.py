"""`make test ONLY=...`: the tests of a package, and of what depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suite.selection import selected


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A package that another one imports inside a function, one that knows neither, and a test for each."""
    for name, text in {
        "rollmesh/mesh/codec.py": "",
        "rollmesh/buffer/client.py": "def load():\n    from rollmesh.mesh import codec\n",
        "rollmesh/learner/losses.py": "import torch\n",
        "tests/helper.py": "import rollmesh.buffer.client\n",
        "tests/mesh/test_codec.py": "",
        "tests/buffer/test_client.py": "from tests.helper import start\n",
        "tests/learner/test_losses.py": "from rollmesh.learner.losses import ppo\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mesh"], ["tests/buffer/test_client.py", "tests/mesh/test_codec.py"]),
        (["buffer"], ["tests/buffer/test_client.py"]),
        (["learner", "buffer"], ["tests/buffer/test_client.py", "tests/learner/test_losses.py"]),
        (["tests/mesh/test_codec.py"], ["tests/mesh/test_codec.py"]),
    ],
)
def test_what_depends_on_a_package_is_selected(repository: Path, names: list[str], expected: list[str]) -> None:
    assert selected(names, repository) == expected


def test_an_unknown_package_is_refused(repository: Path) -> None:
    with pytest.raises(SystemExit, match="ONLY=bufer"):
        selected(["bufer"], repository)

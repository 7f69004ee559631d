"""`make test ONLY=...`: the tests of a package, and of what depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suite.selection import selected


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A package that another one imports inside a function, one that knows neither, a front, and tests of each."""
    for name, text in {
        "mesh/codec.py": "",
        "buffer/client.py": "def load():\n    from rollmesh.mesh import codec\n",
        "learner/losses.py": "import torch\n",
        "rollmesh/cli.py": "",
        "tests/unused.py": "",
        "tests/conftest.py": "import rollmesh.buffer.client\n",
        "tests/agents/conftest.py": "import rollmesh.learner.losses\n",
        "tests/agents/deep/test_agent.py": "",
        "tests/integration/test_run.py": "",
        "tests/test_cli.py": "import rollmesh.cli\n",
        "tests/helper.py": "import rollmesh.buffer.client\n",
        "tests/mesh/test_codec.py": "",
        "tests/buffer/test_client.py": "from tests.helper import start\n",
        "tests/learner/test_losses.py": "from rollmesh.learner.losses import ppo\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for package in ("mesh", "buffer", "learner"):
        (tmp_path / "rollmesh" / package).symlink_to(tmp_path / package)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mesh"], ["tests/buffer/test_client.py", "tests/integration/test_run.py", "tests/mesh/test_codec.py"]),
        (["buffer"], ["tests/buffer/test_client.py", "tests/integration/test_run.py"]),
        (
            ["learner", "mesh/codec.py"],
            [
                "tests/agents/deep/test_agent.py", "tests/buffer/test_client.py", "tests/integration/test_run.py",
                "tests/learner/test_losses.py",
            ],
        ),
        (["rollmesh"], ["tests/integration/test_run.py", "tests/test_cli.py"]),
        (["tests/mesh"], ["tests/mesh/test_codec.py"]),
        (["tests/mesh/test_codec.py"], ["tests/mesh/test_codec.py"]),
        (["tests/helper.py"], ["tests/buffer/test_client.py"]),
    ],
)  # fmt: skip
def test_what_depends_on_a_package_is_selected(repository: Path, names: list[str], expected: list[str]) -> None:
    assert selected(names, repository) == expected


@pytest.mark.parametrize(("name", "why"), [("bufer", "ONLY=bufer: no such"), ("tests/unused.py", "no test depends")])
def test_what_selects_nothing_is_refused(repository: Path, name: str, why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        selected([name], repository)

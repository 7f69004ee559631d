"""Engines by name: those of this package, and those that other packages bring."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.errors import ConfigError
from tests.learner.engines.models import make_spec
from tests.repository import REPOSITORY


def test_another_package_brings_an_engine_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brought.py").write_text("def create(spec, model_type):\n    return spec, model_type\n")
    installed = tmp_path / "brought-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[rollmesh.engines]\nmine = brought:create\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = make_spec(tmp_path)
    assert create_engine(spec, model_type="value_model", backend="mine") == (spec, "value_model")
    with pytest.raises(ConfigError, match="no engine 'yours'") as refused:
        create_engine(spec, backend="yours")
    assert refused.value.hint == "known: fsdp2, megatron, mine"


def test_the_contract_is_collected_as_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "training-engines.md").read_text()
    blocks = re.findall(r"```python\n *# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    for name, code in blocks:
        (tmp_path / name).write_text(textwrap.dedent(code))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["--setup-plan", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    assert pytest.main([*options, str(tmp_path)]) == 0
    planned = capsys.readouterr().out
    assert {name for name, _ in blocks} == {"conftest.py", "test_contract.py"}
    for layout in "one_process", "two_ranks":
        assert re.search(rf"test_contract.py::TestMine::\w+\[{layout}\] \(fixtures used:.*\bworld\b", planned)


def test_the_contracts_asserts_show_what_they_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a test's own module do; the plugin is imported first, as by a package that names it."""
    for name in [name for name in sys.modules if name.startswith("rollmesh.testing.")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("rollmesh.testing.fixtures")
    for name in ("contract_inference", "contract_memory", "contract_state", "contract_training", "engine_cases"):
        module = importlib.import_module(f"rollmesh.testing.{name}")
        assert type(module.__loader__).__name__ == "AssertionRewritingHook", name
    with pytest.raises(AssertionError, match=r"assert dict_keys\(\['found'\]\) == dict_keys\(\[\]\)"):
        module.assert_same({"found": torch.zeros(1)}, {})

"""What the documentation says is checked: generated pages are current, links lead somewhere."""

import re
from pathlib import Path

import pytest
import yaml

from rollmesh.mesh.access.docs_reference import reference as reference_of_verbs
from rollmesh.mesh.access.docs_reference import with_reference
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.docs_reference import reference

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_reference_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), "run `make docs`"


def test_the_table_of_verbs_is_current() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert with_reference(page) == page, "run `make docs`"
    assert reference_of_verbs() in page


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page: Path) -> None:
    folders = "mesh|buffer|reward_service|generators|learner|rollmesh|protos|examples|benchmarks|deploy|tests|docs"
    for target in re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text()):
        assert (ROOT / target).exists(), f"{page.name} names {target}"


SETTINGS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in [*PAGES, *sorted((ROOT / "examples").glob("*/README.md"))]
    for index, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", SETTINGS)
def test_settings_are_taken(block: str) -> None:
    load_config({"model": {"path": "m"}, "data": {"train": "t"}, **yaml.safe_load(block)})


def test_every_failure_names_tests_that_exist() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## What fails, and what happens")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| what dies")]
    assert len(rows) >= 7
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"

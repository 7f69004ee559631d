"""Checks of the documentation: generated pages are current, links lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rollmesh.mesh.access.docs_reference import reference as reference_of_verbs
from rollmesh.mesh.access.docs_reference import with_reference
from rollmesh.mesh.config import Config, load_as
from rollmesh.mesh.config.docs_reference import reference
from rollmesh.mesh.config.foreign.docs_reference import with_tables
from rollmesh.mesh.config.trainers.configs import CONFIGS
from tests.docs.prose import LONGEST_SENTENCE, TRANSLATED, words

ROOT = Path(__file__).resolve().parent.parent.parent
AT_ROOT = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
PAGES = [*AT_ROOT, *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
GUIDES = [*PAGES, ROOT / "deploy" / "README.md", *sorted((ROOT / "examples").glob("*/README.md"))]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_configuration_reference_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), "run `make docs`"


def test_the_tables_of_other_projects_keys_are_current() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text()
    assert with_tables(page) == page, "run `make docs`"


def test_the_table_of_verbs_is_current() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert with_reference(page) == page, "run `make docs`"
    assert reference_of_verbs() in page


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_named_files_exist(page: Path) -> None:
    folders = "mesh|buffer|reward_service|generators|learner|rollmesh|protos|examples|benchmarks|deploy|tests|docs"
    for target in re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text()):
        assert (ROOT / target).exists(), f"{page.name} names {target}"


@pytest.mark.parametrize("name", ["architecture", "training-engines"])
def test_places_in_the_code_exist(name: str) -> None:
    found = re.findall(r"`([\w/]+\.(?:py|lua))::(\w+)`", (ROOT / "docs" / f"{name}.md").read_text())
    assert found
    for file, place in found:
        definition = rf"^\s*(async |local )?(def|class|function) {place}\b"
        assert re.search(definition, (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {place}"


def test_the_module_map_has_every_folder() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `([\w/]+)/` \|", page, re.MULTILINE)
    packages = [path.name for path in (ROOT / "rollmesh").iterdir() if path.is_symlink()]
    found = [path.parent for name in (*packages, "rollmesh") for path in (ROOT / name).rglob("__init__.py")]
    # The links in `rollmesh` lead to the other packages; shims stand in for packages that are not ours.
    own = {folder.resolve().relative_to(ROOT) for folder in found if "shims" not in folder.parts}
    assert {str(folder) for folder in own if folder.parts[0] != "protos"} - set(listed) == set()
    assert [folder for folder in listed if not (ROOT / folder).is_dir()] == []


def _sentences(page: str) -> Iterator[str]:
    text = re.sub(r"```.*?```", "\n\n", page, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "", text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.)\s)|^#.*\n|\||<br>", text, flags=re.MULTILINE):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z\d(c])", re.sub(r"[*_\[]", "", " ".join(block.split())))


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_sentences_are_short(page: Path) -> None:
    assert not [each for each in _sentences(page.read_text()) if words(each) > LONGEST_SENTENCE]


# In prose a question word at the beginning of a statement leaves its noun out; questions are questions.
_BARE_RELATIVE = re.compile(r"(What|Who|Whoever|Whom|Whose|Whether|Why|Which)\b(?!.*\?$)")


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_sentences_are_plain(page: Path) -> None:
    found = [each.strip() for each in _sentences(page.read_text())]
    assert not [each for each in found if _BARE_RELATIVE.match(each) or TRANSLATED.search(each)]


def test_the_benchmarks_that_pages_name_exist() -> None:
    named = {module for page in GUIDES for module in re.findall(r"-m (benchmarks[.\w]+)", page.read_text())}
    assert len(named) > 20
    places = {module: ROOT / module.replace(".", "/") for module in named}
    assert not [
        module
        for module, place in places.items()
        if not (place.with_suffix(".py").exists() or (place / "__main__.py").exists())
    ]


SETTINGS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in GUIDES
    for index, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", SETTINGS)
def test_settings_are_taken(block: str) -> None:
    given = {"model": {"path": "m"}, "data": {"train": "t"}, **yaml.safe_load(block)}
    # A file of a trainer says so in its name, which stands above it.
    trainer = re.match(r"# (sft|rm|dpo)\.yaml\n", block)
    load_as(CONFIGS[trainer[1]] if trainer else Config, given)


def test_every_failure_names_tests_that_exist() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## What fails, and what happens")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| fault")]
    assert len(rows) >= 7
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"

"""The layers: which package may import which, how long a file may be, and what the text may not contain."""

import ast
import importlib.util
import itertools
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sources import parsed

ROOT = Path(__file__).resolve().parent.parent
SERVICES = {"buffer", "reward_service", "generators", "learner"}
PACKAGES = ["protos", "mesh", *sorted(SERVICES), "rollmesh"]
BEYOND_ALGORITHMS = {"grpc", "redis", "transformers", "protos", "buffer", "generators", "mesh"}
HEAVY = {"vllm", "sglang", "megatron", "wandb", "flash_attn", "peft", "tensorboard", "mlflow", "trackio"}
# Where an engine's own package lives, nothing else imports it at the top: it is loaded with the engine.
ENGINES = {
    "vllm": ROOT / "generators" / "engines" / "vllm",
    "sglang": ROOT / "generators" / "engines" / "sglang",
    "megatron": ROOT / "learner" / "engines" / "megatron",
}
FILES = [p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py")) if "_pb2" not in p.name]
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


class Source(NamedTuple):
    """A file, read once for all that is asked of it.

    Attributes:
        body: its statements at the top level.
        text: its docstring.
        nodes: its imports and calls, wherever they stand.
    """

    body: list[ast.stmt]
    text: str | None
    nodes: list[ast.AST]


@cache
def source(path: Path) -> Source:
    tree = parsed(path)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]
    return Source(tree.body, ast.get_docstring(tree), nodes)


@cache
def _imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at the top level) of every import in a file."""
    body, _, nodes = source(path)
    top = set(map(id, body))
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [(f"{node.module}.{alias.name}", id(node) in top) for alias in node.names]
    return found


def _offence(path: Path, module: str, at_top: bool) -> str | None:
    """The rule that an import breaks."""
    package, first = path.relative_to(ROOT).parts[0], module.split(".")[0]
    if first in PACKAGES[:-1]:
        return "our own modules are imported as `rollmesh.`"
    target = next((name for name in PACKAGES if module.startswith(f"rollmesh.{name}.")), first)
    if package in ("protos", "mesh") and target in SERVICES | {"rollmesh"}:
        return "the foundation imports no service"
    if package in SERVICES and target == "rollmesh":
        return "a service does not import the front door"
    if package in SERVICES and target in SERVICES - {package} and ".client" not in module:
        return "a service is imported through its client module"
    if path.is_relative_to(ROOT / "learner" / "algorithms") and target in BEYOND_ALGORITHMS:
        return "algorithms know torch alone"
    if at_top and target in HEAVY and not (target in ENGINES and path.is_relative_to(ENGINES[target])):
        return "heavy packages are imported where they are used"
    for name, home in ENGINES.items():
        if at_top and module.startswith(f"rollmesh.generators.engines.{name}.") and not path.is_relative_to(home):
            return "an engine is loaded by its name"
    return None


MOST_MODULES = 20
# Found by SGLang's server on its path.
NO_PACKAGE = ROOT / "generators" / "engines" / "sglang" / "cpu" / "shims"
# Package -> the only others that import it; tests import all.
ALONE = {
    "redis": ["buffer/redis_backend", "reward_service/cache"],
    "rollmesh.buffer.reference_model": [],
}


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    return name if parts[0] == "rollmesh" else f"rollmesh.{name}"


def _arrows() -> dict[tuple[str, str], tuple[str, str]]:
    """(folder or module, another one next to it) -> an import that leads from one to the other."""
    modules = {_module(path): path for path in FILES}
    found = {}
    for importer, path in modules.items():
        for name, _ in _imports(path):
            imported = name
            while imported not in modules and "." in imported:
                imported = imported.rpartition(".")[0]
            ours, theirs = importer.split("."), imported.split(".")
            apart = next((k for k, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            # A folder's own `__init__` is the folder.
            if apart:
                found[".".join(ours[: apart + 1]), ".".join(theirs[: apart + 1])] = (importer, imported)
    return found


# All files in one test each: a test for each file would cost more than what it does.
def test_imports_respect_the_layers() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {module}: {offence}"
        for path in FILES
        for module, at_top in _imports(path)
        if (offence := _offence(path, module, at_top))
    ]
    assert not found, "\n".join(found)


def test_packages_have_one_name() -> None:
    """In a clone, `import learner` would give a second registry, apart from that of `rollmesh.learner`."""
    for name in PACKAGES[:-1]:
        spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        with pytest.raises(ImportError, match=rf"import rollmesh\.{name}"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_files_are_short_and_say_what_they_are() -> None:
    assert not [path for path in FILES if len(path.read_text().splitlines()) > 600], "too long"
    silent = [path for path in FILES if source(path).body and not source(path).text]
    assert not silent, "a module says what it is"


def test_folders_are_small() -> None:
    modules = Counter(path.parent for path in [*FILES, *BENCHMARKS] if path.name != "__init__.py")
    assert not {folder: count for folder, count in modules.items() if count > MOST_MODULES}
    silent = {folder for folder in modules if not (folder / "__init__.py").exists()}
    assert silent == {NO_PACKAGE}, "a folder says what is in it"


def test_neither_folders_nor_modules_import_in_circles() -> None:
    arrows = _arrows()
    after: dict[str, set[str]] = {}
    for start, end in arrows:
        after.setdefault(start, set()).add(end)
    try:
        list(TopologicalSorter(after).static_order())
    except CycleError as circle:
        pairs = itertools.pairwise(reversed(circle.args[1]))
        raise AssertionError("\n".join(f"{arrows[pair][0]} imports {arrows[pair][1]}" for pair in pairs)) from None


def test_some_is_imported_in_one_place_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in FILES
        for module, _ in _imports(path)
        for alone, places in ALONE.items()
        if f"{module}.".startswith(f"{alone}.") and not _module(path).startswith(alone)
        if not any(path.is_relative_to(ROOT / place) for place in places)
    ]
    assert not found, "\n".join(found)

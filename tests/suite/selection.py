"""`python -m tests.suite.selection NAME...`: the test files of a package and of all that depends on it.

`buffer` and `buffer/policy` name packages, `tests/buffer` a folder of tests, and `tests/buffer/test_sweep.py` one file.
A test depends on a package if it imports one of its modules, directly or not. Its folders' conftests count as its own.
Imports are read, not executed. Tests of whole meshes depend on every package.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from tests.repository import REPOSITORY

PACKAGES = ("protos", "mesh", "buffer", "reward_service", "generators", "learner")
# They start services by their commands, which no import tells.
_OF_MESHES = ("tests/integration", "tests/faults", "tests/nodes", "tests/learner/live")


def selected(names: Sequence[str], root: Path = REPOSITORY) -> list[str]:
    """Paths of test files, relative to the root, including every test in a package's own test folder.

    Raises:
        SystemExit: a name is unknown, or no test depends on it.
    """
    for name in names:
        if not (root / name).exists() and not (root / "rollmesh" / name).exists():
            raise SystemExit(
                f"ONLY={name}: no such package; give one as its folder is called, as buffer or buffer/policy"
            )
    chosen = [path for path in sorted((root / "tests").rglob("test_*.py")) if _concerns(path, names, root)]
    if not chosen:
        raise SystemExit(f"ONLY={' '.join(names)}: no test depends on it")
    return [str(path.relative_to(root)) for path in chosen]


def direct_importers(path: str, root: Path = REPOSITORY) -> list[str]:
    """Test files, relative to the root, that import the module of a file, or its package, themselves."""
    name = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
    module = name if name.startswith("rollmesh") else f"rollmesh.{name}"
    wanted = {module, module.rpartition(".")[0]}
    tests = sorted((root / "tests").rglob("test_*.py"))
    return [str(test.relative_to(root)) for test in tests if not wanted.isdisjoint(_imported(test, root))]


def _concerns(path: Path, names: Sequence[str], root: Path) -> bool:
    inside = path.relative_to(root)
    if any(inside.is_relative_to(folder) for name in names for folder in (name, f"tests/{name}")):
        return True
    if any(inside.is_relative_to(folder) for folder in _OF_MESHES) and not all(map(_is_test, names)):
        return True
    modules = closure(path, root).union(*(closure(conftest, root) for conftest in _conftests(path, root)))
    # A folder of tests is itself alone.
    return any(_is_in(modules, name, root) for name in names if not (_is_test(name) and (root / name).is_dir()))


def _is_test(name: str) -> bool:
    return name.partition("/")[0] == "tests"


def _conftests(path: Path, root: Path) -> Iterator[Path]:
    """Those of the folders between the root of all tests, which every test would depend on, and a test."""
    for folder in path.parents[: len(path.relative_to(root / "tests").parts) - 1]:
        if (conftest := folder / "conftest.py").is_file():
            yield conftest


def _is_in(modules: Iterable[str], package: str, root: Path) -> bool:
    """Whether one of the modules belongs to a package."""
    files = filter(None, (_file(module, root) for module in modules))
    # `rollmesh/buffer` is a link to `buffer`.
    places = (file.resolve().relative_to(root.resolve()) for file in files)
    return any(place.is_relative_to(name) for place in places for name in (package, f"rollmesh/{package}"))


def closure(path: Path, root: Path = REPOSITORY) -> set[str]:
    """Names of the repository's modules that a file loads, directly or not."""
    found, left = set[str](), list(_imported(path, root))
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += _imported(_file(module, root), root)
    return found


@cache
def _imported(path: Path | None, root: Path) -> tuple[str, ...]:
    if path is None:
        return ()
    names = _names(ast.parse(path.read_text(encoding="utf-8")))
    return tuple({module for name in names if (module := _module(name, root))})


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _module(name: str, root: Path) -> str:
    """The module of the repository that a name is, or is in; empty: none."""
    while name and _file(name, root) is None:
        name = name.rpartition(".")[0]
    return name


@cache
def _file(module: str, root: Path) -> Path | None:
    if module.partition(".")[0] not in ("rollmesh", "tests", "benchmarks", "examples", "deploy"):
        return None
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


if __name__ == "__main__":
    print("\n".join(selected(sys.argv[1:])))

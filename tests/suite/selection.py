"""`python -m tests.suite.selection PACKAGE...`: the test files of a package and of whatever depends on it.

A test file depends on a package if it imports one of its modules, itself or through other modules. Imports are read,
not executed. `buffer` and `buffer/policy` name packages; `tests/buffer/test_sweep.py` names a test file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path

from tests.repository import REPOSITORY

PACKAGES = ("protos", "mesh", "buffer", "reward_service", "generators", "learner")


def selected(names: Sequence[str], root: Path = REPOSITORY) -> list[str]:
    """Paths of test files, relative to the root; folders of tests that bear a package's name are among them whole.

    Raises:
        SystemExit: there is no such package.
    """
    for name in names:
        if not (root / name).exists() and not (root / "rollmesh" / name).exists():
            raise SystemExit(
                f"ONLY={name}: no such package; give one as its folder is called, as buffer or buffer/policy"
            )
    chosen = [path for path in sorted((root / "tests").rglob("test_*.py")) if _concerns(path, names, root)]
    return [str(path.relative_to(root)) for path in chosen]


def direct_importers(path: str, root: Path = REPOSITORY) -> list[str]:
    """Test files, relative to the root, that import the module of a file themselves."""
    name = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
    module = name if name.startswith("rollmesh") else f"rollmesh.{name}"
    tests = sorted((root / "tests").rglob("test_*.py"))
    return [str(test.relative_to(root)) for test in tests if module in _imported(test, root)]


def _concerns(path: Path, names: Sequence[str], root: Path) -> bool:
    inside = path.relative_to(root / "tests")
    if any(inside.is_relative_to(name) or path == root / name for name in names):
        return True
    wanted = {name.replace("/", ".") for name in names}
    return any(_is_in(module, wanted) for module in closure(path, root))


def _is_in(module: str, packages: Collection[str]) -> bool:
    name = module.removeprefix("rollmesh.")
    return any(name == package or name.startswith(f"{package}.") for package in packages)


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

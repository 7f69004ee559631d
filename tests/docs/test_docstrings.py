"""Names in docstrings: arguments and attributes are those of the code, and places in the code exist."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from tests.config_keys import is_key
from tests.docs.prose import statements
from tests.sources import parsed

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("mesh", "buffer", "reward_service", "generators", "learner", "rollmesh")
Function = ast.FunctionDef | ast.AsyncFunctionDef
# An entry of a section: one name or several, a colon, a text.
_ENTRY = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*):\s")
_FILES = (".json", ".jsonl", ".yaml", ".log", ".sock", ".lua", ".py", ".md")


@cache
def _modules() -> dict[Path, ast.Module]:
    paths = (path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py")))
    # The links in `rollmesh` lead to the other packages.
    own = {path.resolve(): path for path in paths if "__pycache__" not in path.parts}
    return {path: parsed(path) for path in sorted(own)}


@cache
def _definitions() -> list[tuple[Path, ast.Module | ast.ClassDef | Function]]:
    """Modules, classes and functions, each with the path of its file."""
    every = ((path, node) for path, tree in _modules().items() for node in statements(tree))
    return [(path, node) for path, node in every if isinstance(node, ast.Module | ast.ClassDef | Function)]


@cache
def _classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for _, node in _definitions():
        if isinstance(node, ast.ClassDef):
            found.setdefault(node.name, []).append(node)
    return found


def _named(docstring: str, section: str) -> Iterator[str]:
    """The names of a section's entries."""
    inside = False
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            inside = line == f"{section}:"
        elif inside and (entry := _ENTRY.match(line)):
            yield from (name.strip(" *") for name in entry[1].split(","))


def _parameters(function: Function) -> set[str]:
    given = function.args
    every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    return {each.arg for each in every if each is not None}


@cache
def _own_attributes(node: ast.ClassDef) -> frozenset[str]:
    """Fields, properties, methods and what methods set."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, Function):
            found.add(each.name)
        elif isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store):
            found.add(each.id if isinstance(each, ast.Name) else each.attr)
    return frozenset(found)


def _attributes(node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> set[str]:
    """The same with those of base classes."""
    found = set(_own_attributes(node))
    for base in node.bases:
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        for known in _classes().get(name, []):
            if name not in seen:
                found |= _attributes(known, seen | {name})
    return found


def _arguments(node: ast.ClassDef) -> set[str]:
    """Parameters of the constructor; fields are parameters of a dataclass's."""
    made = (each for each in node.body if isinstance(each, Function) and each.name in ("__init__", "__new__"))
    return _attributes(node).union(*(_parameters(function) for function in made))


@pytest.mark.parametrize("package", PACKAGES)
def test_arguments_and_attributes_are_those_of_the_code(package: str) -> None:
    wrong = []
    folder = ROOT / package
    for path, node in _definitions():
        if isinstance(node, ast.Module) or not path.is_relative_to(folder):
            continue
        known: dict[str, Callable[[], set[str]]]
        if isinstance(node, ast.ClassDef):
            known = {"Args": partial(_arguments, node), "Attributes": partial(_attributes, node)}
        else:
            known = {"Args": partial(_parameters, node)}
        for section, names in known.items():
            if not (named := list(_named(ast.get_docstring(node) or "", section))):
                continue
            found = names()
            lost = [name for name in named if name not in found]
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {section} {name}" for name in lost]
    assert not wrong


def _is_place(name: str) -> bool:
    """True for a package or a module, or a name that a module defines."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:length])
        module = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if module.is_file():
            return set(parts[length:]) <= _words(module)
    return False


@cache
def _words(path: Path) -> frozenset[str]:
    """The words of a module, but for those in backquotes."""
    return frozenset(re.findall(r"\w+", re.sub(r"`[^`\n]*`", "", path.read_text(encoding="utf-8"))))


def _docstrings() -> Iterator[tuple[str, str]]:
    """(path, docstring) of everything."""
    for path, node in _definitions():
        if docstring := ast.get_docstring(node):
            yield str(path.relative_to(ROOT)), docstring


def test_dotted_places_in_docstrings_exist() -> None:
    dotted = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`")
    # Groups of entry points, and services of the contracts.
    others = (ROOT / "pyproject.toml").read_text() + "".join(map(Path.read_text, (ROOT / "protos").rglob("*.proto")))
    named = [(path, name) for path, docstring in _docstrings() for name in dotted.findall(docstring)]
    assert len(named) > 20
    assert not [
        (path, name)
        for path, name in named
        if not (is_key(name) or _is_place(name) or name.endswith(_FILES) or name.rpartition(".")[0] in others)
    ]


def test_names_that_docstrings_and_comments_refer_to_exist() -> None:
    defined = frozenset().union(*map(_words, _modules()), *(path.relative_to(ROOT).parts for path in _modules()))
    # Comments too.
    see = re.compile(r"\b[Ss]ee `(\w+(?:\.\w+)*)`")
    named = [(str(path), name) for path in _modules() for name in see.findall(path.read_text(encoding="utf-8"))]
    assert len(named) > 20
    assert not [(path, name) for path, name in named if not set(name.split(".")) <= defined]

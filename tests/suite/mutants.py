"""Mutation testing by sample: `python -m tests.suite.mutants --count 300 --seed 1 --json FILE [--suite OTHER_CLONE]`.

Each mutant changes one operator, comparison, constant, condition or statement of the product. Its near tests run: those
that import its module or package, then those of the folder that mirrors its package. A mutant is killed by the first
test that fails. With `--suite` the tests of another clone run against the same mutants. A mutant that one suite kills
and another does not is a proof that was lost.

A mutant is in the working tree while its tests run, and is taken back at its end or when this program is stopped.
After `kill -9` it stays: `git diff` shows it, and the next run refuses to begin.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.repository import REPOSITORY
from tests.suite.selection import PACKAGES, direct_importers

# A mutant that loops for ever is killed by its time.
_WITHIN_S = 900
_QUICK_FIRST = ("not slow and not engine", "slow or engine")
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: of the file, relative to the repository.
        line: of the change.
        change: in words.
        source: of the whole file with it.
    """

    path: str
    line: int
    change: str
    source: str


def places_in(tree: ast.Module) -> list[tuple[int, str]]:
    """Numbers of the nodes that can be changed, in the order of `ast.walk`, and the change of each in words."""
    return [(at, change) for at, node in enumerate(ast.walk(tree)) if (change := _change(node))]


def mutant_at(path: Path, place: int, change: str) -> Mutant:
    """The mutant of a file at one of its places."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node = next(found for at, found in enumerate(ast.walk(tree)) if at == place)
    _apply(node)
    source = ast.unparse(ast.fix_missing_locations(tree))
    return Mutant(str(path.relative_to(REPOSITORY)), getattr(node, "lineno", 0), change, source)


def _change(node: ast.AST) -> str:
    """The change of a node in words; empty: none."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            return f"{type(operator).__name__} -> {_COMPARISONS[type(operator)].__name__}"
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS and not _is_text(node):
            return f"{type(operator).__name__} -> {_OPERATORS[type(operator)].__name__}"
        case ast.BoolOp():
            return "and <-> or"
        case ast.If() | ast.IfExp():
            return "condition negated"
        case ast.Constant(value=bool()):
            return "True <-> False"
        case ast.Constant(value=int() | float()):
            return "constant + 1"
        case ast.Expr(value=ast.Call() | ast.Await()):
            return "call left out"
    return ""


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.JoinedStr) or _is_str(side) for side in (node.left, node.right))


def _is_str(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _apply(node: ast.AST) -> None:
    match node:
        case ast.Compare():
            node.ops = [_COMPARISONS[type(node.ops[0])]()]
        case ast.BinOp():
            node.op = _OPERATORS[type(node.op)]()
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.If() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Constant(value=bool() as value):
            node.value = not value
        case ast.Constant(value=int() | float() as value):
            node.value = value + 1
        case ast.Expr():
            node.value = ast.Constant(None)


def sample(count: int, seed: int, packages: Sequence[str]) -> list[Mutant]:
    """Mutants of so many files, drawn by seed; each package in turn, so that small ones are seen too."""
    draw = random.Random(seed)
    files = {name: [p for p in sorted((REPOSITORY / name).rglob("*.py")) if "_pb2" not in p.name] for name in packages}
    found: list[Mutant] = []
    while len(found) < count:
        path = draw.choice(files[packages[len(found) % len(packages)]])
        if places := places_in(ast.parse(path.read_text(encoding="utf-8"))):
            found.append(mutant_at(path, *draw.choice(places)))
    return found


def near_tests(path: str, suite: Path) -> list[str]:
    """Test files of a module: those that import it, and those of its package's folder."""
    folder = (suite / "tests" / path).parent
    while not folder.is_dir() or not any(folder.glob("test_*.py")):
        folder = folder.parent
    importers = direct_importers(path, suite)
    return list(dict.fromkeys([*importers, *(str(p.relative_to(suite)) for p in sorted(folder.glob("test_*.py")))]))


def is_killed(mutant: Mutant, suite: Path, *, quick: bool = False) -> str:
    """The test that kills it; empty: it survives. `quick`: only tests that are neither slow nor of an engine run."""
    path = suite / mutant.path
    before = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    command = [str(suite / ".venv" / "bin" / "python"), "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no"]
    tests = near_tests(mutant.path, suite)
    try:
        passes = _QUICK_FIRST[:1] if quick else _QUICK_FIRST
        return next(filter(None, (_failed([*command, "-m", marks, *tests], suite) for marks in passes)), "")
    finally:
        path.write_text(before, encoding="utf-8")


def _failed(command: Sequence[str], suite: Path) -> str:
    """The test at which pytest has stopped; empty: all have passed."""
    try:
        done = subprocess.run(
            command, cwd=suite, capture_output=True, text=True, timeout=_WITHIN_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return "does not end"
    if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or [f"pytest ended with {done.returncode}"])[-1]


def _check_clean(suite: Path) -> None:
    command = ["git", "-C", str(suite), "status", "--porcelain", "--untracked-files=no"]
    if changed := subprocess.run(command, capture_output=True, text=True, check=True).stdout:
        raise SystemExit(f"commit or undo these changes first, one may be a mutant that has stayed:\n{changed}")


def main() -> None:
    """See the module."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--packages", default=",".join((*PACKAGES[1:], "rollmesh")))
    parser.add_argument("--suite", type=Path, default=REPOSITORY, help="clone whose tests run, with its own .venv")
    parser.add_argument("--survivors-of", type=Path, help="only what survived in this record")
    parser.add_argument("--quick", action="store_true", help="leave out slow tests and those of engines")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    _check_clean(options.suite)
    mutants = sample(options.count, options.seed, options.packages.split(","))
    if options.survivors_of is not None:
        records = json.loads(options.survivors_of.read_text())
        alive = {(found["path"], found["line"], found["change"]) for found in records if not found["killed_by"]}
        mutants = [mutant for mutant in mutants if (mutant.path, mutant.line, mutant.change) in alive]
    records = []
    for place, mutant in enumerate(mutants, 1):
        killed_by = is_killed(mutant, options.suite, quick=options.quick)
        records.append({**asdict(mutant), "killed_by": killed_by} | {"source": ""})
        options.json.write_text(json.dumps(records, indent=1))
        print(f"{place} of {len(mutants)}  {mutant.path}:{mutant.line}  {mutant.change}: {killed_by or 'SURVIVES'}")
    survivors = sum(not record["killed_by"] for record in records)
    print(f"{len(records) - survivors} of {len(records)} killed")


if __name__ == "__main__":
    main()

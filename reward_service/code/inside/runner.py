"""Runs test code case by case: scripts of assertions, `check(candidate)`, test functions, test classes.

The code under test is reached by a function from names to values; what that is, its caller decides.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

# Modules from which test files import the program.
PROGRAM = ("solution", "answer", "candidate", "main", "program", "submission")
_SEED = 0
_TEXT = 300


class BrokenError(Exception):
    """The tests cannot be run, whatever the program is."""


class Runner:
    """One run of the tests.

    Args:
        request: `setup`, `parts` and `entry_point`, see `rows.Script`.
        lookup: the value of a name of the program; AttributeError if it has none.
        passes: called with the number and name of each case that has passed.
        swallow: asked in a statement that has raised; raises again, or passes over it. None: nothing is passed over.
        stops: exceptions that end the run.
    """

    def __init__(
        self,
        request: dict[str, Any],
        lookup: Callable[[str], Any],
        passes: Callable[[int, str], None],
        *,
        swallow: Callable[[BaseException], None] | None = None,
        stops: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._parts: list[str] = request["parts"]
        self._entry_point: str = request["entry_point"]
        self._lookup = lookup
        self._passes = passes
        self._swallow = swallow
        self._stops = stops
        self.cases: list[dict[str, Any]] = []
        module = ModuleType("tests")
        self._names = module.__dict__
        sys.modules["tests"] = module
        if swallow is not None:
            self._names["__swallow__"] = swallow
        try:
            self._setup = self._parsed(request["setup"])
            self._trees = [self._parsed(part) for part in self._parts]
        except (SyntaxError, ValueError, RecursionError) as error:
            raise BrokenError(f"the tests are no Python: {error}") from error

    def run(self) -> None:
        """Runs all cases.

        Raises:
            BrokenError: the tests themselves do not work.
        """
        random.seed(_SEED)
        self._find_names()
        whole = len(self._trees) == 1
        for statement in self._setup.body:
            self._attempt(partial(self._execute, [statement]), "")
        for number, tree in enumerate(self._trees):
            if whole:
                self._run_file(tree)
            else:
                self._attempt(partial(self._execute, tree.body), f"part {number + 1}")
        if not self.cases:
            raise BrokenError("the tests have no case: no assertion and no test function")

    # ------------------------------------------------------------------------------------------ code

    def _parsed(self, source: str) -> ast.Module:
        tree = ast.parse(source, "tests")
        tree.body = [statement for statement in tree.body if not _is_main(statement)]
        if self._swallow is not None:
            _Swallowing().visit(tree)
        return tree

    def _find_names(self) -> None:
        """Puts in the program's names that the tests use and do not bind."""
        used: set[str] = set()
        bound: set[str] = set()
        for tree in (self._setup, *self._trees):
            for node in ast.walk(tree):
                if isinstance(node, ast.Name):
                    (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
                elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                    bound.add(node.name)
                elif isinstance(node, ast.arg):
                    bound.add(node.arg)
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    bound.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ExceptHandler) and node.name:
                    bound.add(node.name)
        own = {self._entry_point} if self._entry_point in used else set()
        for name in sorted((used - bound - vars(builtins).keys() - {"__swallow__", "__file__", "__name__"}) | own):
            try:
                self._names[name] = self._lookup(name)
            except AttributeError:  # it raises NameError where it is used
                continue

    def _execute(self, statements: list[ast.stmt]) -> None:
        # Type-checkers read `type_ignores` as needed.
        exec(compile(ast.Module(statements, type_ignores=[]), "tests", "exec", dont_inherit=True), self._names)  # noqa: S102

    # ------------------------------------------------------------------------------------------ cases

    def _run_file(self, tree: ast.Module) -> None:
        checked = False
        for statement in tree.body:
            name = f"line {statement.lineno}" if _is_case(statement) else ""
            checked = checked or "check" in name_of_call(statement)
            self._attempt(partial(self._execute, [statement]), name)
        if self._entry_point and not checked and callable(self._names.get("check")):
            self._attempt(lambda: self._names["check"](self._lookup(self._entry_point)), "check")
        defined = {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in self._names
        }
        unittest = sys.modules.get("unittest")
        for name in [name for name in self._names if name in defined]:
            value = self._names[name]
            if unittest and inspect.isclass(value) and issubclass(value, unittest.TestCase):
                for method in unittest.defaultTestLoader.getTestCaseNames(value):
                    self._attempt(partial(_run_unittest, value, method), f"{name}.{method}")
            elif inspect.isclass(value) and name.startswith("Test"):
                for method in [method for method in vars(value) if method.startswith("test")]:
                    self._run_function(f"{name}.{method}", getattr(value, method), value)
            elif inspect.isfunction(value) and name.startswith("test"):
                self._run_function(name, value, None)

    def _run_function(self, name: str, function: Any, owner: Any) -> None:
        for given in _parameters(function):

            def call(given: dict[str, Any] = given) -> None:
                held: Any = owner() if owner is not None else None
                if hasattr(held, "setup_method"):
                    held.setup_method(function) if _takes(held.setup_method) else held.setup_method()
                bound = function.__get__(held) if held is not None else function
                wanted = [name for name in inspect.signature(bound).parameters if name not in given]
                bound(**given, **{name: self._fixture(name) for name in wanted})

            self._attempt(call, f"{name}[{', '.join(map(_short, given.values()))}]" if given else name)

    def _fixture(self, name: str) -> Any:
        function: Any = self._names.get(name)
        if not getattr(function, "_is_fixture", False):
            raise BrokenError(f"the tests need the fixture {name!r}, which is not here")
        wanted = {each: self._fixture(each) for each in inspect.signature(function).parameters}
        made = function(**wanted)
        return next(made) if isinstance(made, Iterator) and inspect.isgenerator(made) else made

    def _attempt(self, run: Callable[[], Any], name: str) -> None:
        """Runs a case, or with an empty name a statement between cases: if that fails, so do cases that need it."""
        number = len(self.cases)
        try:
            run()
            if name:
                self._passes(number, name)
            passed, text = True, ""
        except self._stops:
            raise
        except BrokenError:
            raise
        except BaseException as error:  # what a failed test raises
            if isinstance(error, ImportError) and not _is_programs(error) and not hasattr(error, "of_program"):
                raise BrokenError(f"the tests cannot import: {error}") from error
            passed, text = False, f"{type(error).__name__}: {error}"[:_TEXT]
        if name:
            self.cases.append({"name": name, "passed": passed, "text": text})


class _Swallowing(ast.NodeVisitor):
    """Puts each statement into `try: ... except BaseException as error: __swallow__(error)`.

    Not what leaves a function, and nothing in a `while`: passed over there, a loop would not end.
    """

    def __init__(self) -> None:
        self._in_while = False

    def generic_visit(self, node: ast.AST) -> None:
        outer = self._in_while
        if isinstance(node, ast.While):
            self._in_while = True
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            self._in_while = False
        for value in vars(node).values():
            # No expression holds a statement.
            if not isinstance(value, list) or not value or isinstance(value[0], ast.expr):
                continue
            for number, entry in enumerate(value):
                if isinstance(entry, ast.AST):
                    self.visit(entry)
                if isinstance(entry, ast.stmt):
                    value[number] = self._wrapped(entry)
        self._in_while = outer

    def _wrapped(self, statement: ast.stmt) -> ast.stmt:
        if self._in_while or isinstance(statement, _KEPT) or _is_text(statement):
            return statement
        at = {name: getattr(statement, name) for name in statement._attributes}
        function, raised = (ast.Name(name, ast.Load(), **at) for name in ("__swallow__", "__raised__"))
        passed_over = ast.Expr(ast.Call(function, [raised], [], **at), **at)
        handler = ast.ExceptHandler(ast.Name("BaseException", ast.Load(), **at), "__raised__", [passed_over], **at)
        return ast.Try([statement], [handler], [], [], **at)


_KEPT = (
    ast.Return,
    ast.Raise,
    ast.Break,
    ast.Continue,
    ast.Pass,
    ast.Global,
    ast.Nonlocal,
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_main(statement: ast.stmt) -> bool:
    """True for `if __name__ == ...`, and for an import of everything from the program."""
    if isinstance(statement, ast.If):
        return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test))
    return isinstance(statement, ast.ImportFrom) and statement.module in PROGRAM and statement.names[0].name == "*"


def _is_case(statement: ast.stmt) -> bool:
    """True for an assertion, a statement with one in it, and a call."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    return bool(name_of_call(statement)) or any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def name_of_call(statement: ast.stmt) -> list[str]:
    """The name of the function that a statement does nothing but call, if it is one."""
    if isinstance(statement, ast.Try) and len(statement.body) == 1:
        statement = statement.body[0]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        return [function.id if isinstance(function, ast.Name) else "."]
    return []


def _is_programs(error: ImportError) -> bool:
    return (error.name or "").partition(".")[0] in PROGRAM


def _parameters(function: Any) -> Iterator[dict[str, Any]]:
    """Arguments by name of each call that `pytest.mark.parametrize` asks for; those of several marks are combined."""
    found: list[dict[str, Any]] = [{}]
    for names, rows in getattr(function, "_parameters", ()):
        found = [{**one, **dict(zip(names, row, strict=True))} for row in rows for one in found]
    yield from found


def _takes(method: Any) -> bool:
    return bool(inspect.signature(method).parameters)


def _short(value: Any) -> str:
    return str(value)[:20] if isinstance(value, str | int | float) else type(value).__name__


def _run_unittest(kind: Any, method: str) -> None:
    case = kind(method)
    kind.setUpClass()
    try:
        case.setUp()
        try:
            getattr(case, method)()
        finally:
            case.tearDown()
            case.doCleanups()
    finally:
        kind.tearDownClass()

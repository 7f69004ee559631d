"""Imports that programs for tests leave out, because the harnesses of published datasets have star imports. Pure.

Only what a program names is imported: star imports take half as long again as a small program.
"""

from __future__ import annotations

import re

_MODULES = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "io", "itertools"),
    *("json", "math", "operator", "os", "random", "re", "statistics", "string", "sys", "time"),
)
_MEMBERS = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List Optional Sequence Set "
    "Tuple Type TypeVar Union",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby islice pairwise "
    "permutations product repeat starmap takewhile dropwhile zip_longest",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "math": "ceil comb cos exp factorial floor gcd hypot inf isqrt lcm log log10 log2 perm pi prod sin sqrt",
    "copy": "deepcopy",
    "dataclasses": "dataclass field",
    "fractions": "Fraction",
    "decimal": "Decimal",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
}
PRELOADED = tuple(sorted({*_MODULES, *_MEMBERS}))
"""All modules that may be imported so."""
_STATEMENTS = {
    **{module: f"import {module}" for module in _MODULES},
    **{name: f"from {module} import {name}" for module, names in _MEMBERS.items() for name in names.split()},
}
_WORD = re.compile(r"[A-Za-z_]\w*")
# It has to be the first statement.
_FUTURE = re.compile(r"^from __future__ import [^(\n]+$", re.MULTILINE)


def with_imports(source: str, *, first: str = "") -> str:
    """A program with one row in front, or after its future import: what it names and may not have imported.

    Args:
        source: a Python program.
        first: a statement for that row.
    """
    statements = [_STATEMENTS[word] for word in sorted(set(_WORD.findall(source)) & _STATEMENTS.keys())]
    row = "; ".join([first, *statements] if first else statements)
    if not row:
        return source
    if (future := _FUTURE.search(source)) is not None:
        return f"{source[: future.end()]}; {row}{source[future.end() :]}"
    return source if "from __future__" in source and not first else f"{row}\n{source}"

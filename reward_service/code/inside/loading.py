"""Loads the program as the module `solution`, with the names that programs for tests take for granted."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

# As in the harnesses of published data sets, which put star imports in front of each program.
PRELUDE = (
    "from typing import *\n"
    "import bisect, collections, copy, datetime, decimal, fractions, functools, heapq, io, itertools, json, math\n"
    "import operator, os, random, re, statistics, string, sys, time\n"
    "from collections import Counter, OrderedDict, defaultdict, deque, namedtuple, ChainMap\n"
    "from functools import cache, cmp_to_key, lru_cache, partial, reduce\n"
    "from itertools import accumulate, chain, combinations, combinations_with_replacement, count, cycle, groupby, "
    "islice, pairwise, permutations, product, repeat, zip_longest\n"
    "from heapq import heapify, heappop, heappush, heappushpop, heapreplace, merge, nlargest, nsmallest\n"
    "from bisect import bisect_left, bisect_right, insort, insort_left, insort_right\n"
    "from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, pi, sqrt\n"
    "from copy import deepcopy\n"
    "from dataclasses import dataclass, field\n"
    "from fractions import Fraction\n"
    "from decimal import Decimal\n"
)


def private_channel() -> int:
    """A descriptor of standard output that no print reaches: what is printed goes to standard error."""
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel


def put(channel: int, text: str) -> None:
    """Writes a text."""
    data = text.encode()
    while data:
        data = data[os.write(channel, data) :]


def load_solution(path: str) -> Any:
    """The program as a module; raises whatever it raises."""
    module = ModuleType("solution")
    sys.modules["solution"] = module
    exec(PRELUDE, module.__dict__)  # noqa: S102
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    return module

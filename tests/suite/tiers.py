"""Two tiers: `make test` proves every promise once, `make test-all` on every cell of every product.

A test marked `exhaustive` runs only in the second one (`--all`). It needs a sibling in the first that proves the same
rule on one cell. `covering` makes such a product: the rows in which each pair of values occurs are in the first tier,
the others in the second. Tests that need a CUDA device are left out, and counted, on machines without one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

LEFT_OUT = pytest.StashKey[dict[str, int]]()
"""Numbers of tests that were left out, by reason."""


def covering(valid: Callable[..., bool] = lambda **_: True, /, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with the product of the axes; each pair of values of two axes is in the first tier.

    Args:
        valid: whether a combination exists, given by keyword.
        axes: values by argument name; two axes at least.
    """
    names = list(axes)
    rows = [row for row in itertools.product(*axes.values()) if valid(**dict(zip(names, row, strict=True)))]
    first = _cover(rows)
    params = [pytest.param(*row, marks=() if at in first else pytest.mark.exhaustive) for at, row in enumerate(rows)]
    return pytest.mark.parametrize(",".join(names), params)


def _cover(rows: Sequence[Sequence[Any]]) -> set[int]:
    """Numbers of rows in which every pair of values of all rows occurs, chosen greedily.

    The package allpairspy does not serve: with constraints it leaves out pairs that exist.
    """
    # Values need not be hashable.
    pairs = [set(itertools.combinations([(at, id(value)) for at, value in enumerate(row)], 2)) for row in rows]
    missing, chosen = set().union(*pairs), set()
    while missing:
        best = max(range(len(rows)), key=lambda at: len(pairs[at] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def add_options(parser: pytest.Parser) -> None:
    """Adds the option of the second tier."""
    parser.addoption("--all", action="store_true", dest="all_tiers", help="also run tests marked `exhaustive`")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what this run leaves out."""
    left_out = {reason: [item for item in items if test(item)] for reason, test in _reasons(config).items()}
    config.stash[LEFT_OUT] = {reason: len(found) for reason, found in left_out.items()}
    gone = {id(item) for found in left_out.values() for item in found}
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in gone])
        items[:] = [item for item in items if id(item) not in gone]


def _reasons(config: pytest.Config) -> dict[str, Callable[[pytest.Item], bool]]:
    reasons: dict[str, Callable[[pytest.Item], bool]] = {}
    if not _cuda():
        reasons["need a CUDA device"] = lambda item: item.get_closest_marker("gpu") is not None
    if not config.getoption("all_tiers"):
        reasons["run in `make test-all`"] = lambda item: (
            item.get_closest_marker("exhaustive") is not None and item.get_closest_marker("gpu") is None
        )
    return reasons


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()

"""Reads mathematics out of a text with math-verify, which keeps the meaning of formulas that come again."""

from __future__ import annotations

import logging
from functools import cache, lru_cache
from typing import Any

NO_TIMEOUT = 0
"""The library's own time limits need signals: only the main thread gets them, and none during one big power."""
# Formulas of so many characters at most whose meaning is kept. The library keeps 20, and a batch has more truths.
_KEPT_FORMULAS, _KEPT_LENGTH = 4096, 256
# Each worker would write that these time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def parse(text: str) -> list[Any]:
    r"""The answer that a text gives, in a `\boxed{}`, as a formula or as a plain expression.

    Returns:
        Its meanings in sympy's objects, and last the text that was read; empty where nothing can be read.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig
    from math_verify import parse as read

    _keep_more_formulas()
    return list(read(text, (LatexExtractionConfig(), ExprExtractionConfig()), parsing_timeout=NO_TIMEOUT))


@cache
def _keep_more_formulas() -> None:
    """Gives the library's cache of formulas more room: reading one takes ten times as long as all else."""
    from math_verify import parser

    read = parser.parse_latex_cached.__wrapped__
    read_once = lru_cache(maxsize=_KEPT_FORMULAS)(read)
    vars(parser)[read.__name__] = lambda latex: (read_once if len(latex) <= _KEPT_LENGTH else read)(latex)

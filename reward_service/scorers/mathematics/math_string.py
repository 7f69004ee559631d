r"""Competition mathematics without a computer algebra system: the last `\boxed{}`, compared as normalized LaTeX.

The rules are those of the MATH dataset's evaluation (Hendrycks et al., arXiv:2103.03874). Layout, units, degrees,
percent and dollar signs are dropped. Short fractions and roots get their braces; `a/b` of integers becomes a fraction.
Quick and predictable, but 0.75 is not 3/4 here: `math` compares values.
"""

from __future__ import annotations

import re

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scorers.boxes import last_boxed, one_answer
from rollmesh.reward_service.scorers.truths import compares_with

# In this order: text -> replacement.
_REWRITES = (
    ("\n", ""),
    (r"\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    (r"\left", ""),
    (r"\right", ""),
    (r"^{\circ}", ""),
    (r"^\circ", ""),
    (r"\$", ""),
)
_UNIT = r"\text{ "
_PERCENT = (r"\%", "%")
_SHORT_ROOT = re.compile(r"\\sqrt([^{])")
_SHORT_FRACTION = re.compile(r"\\frac([^{])([^{])")
_HALF_SHORT_FRACTION = re.compile(r"\\frac([^{])\{")
_INTEGER_RATIO = re.compile(r"(-?\d+)/(-?\d+)")


def normalize(text: str) -> str:
    """The common spelling of answers that differ only in layout."""
    for written, replacement in _REWRITES:
        text = text.replace(written, replacement)
    if text.count(_UNIT) == 1:
        text = text.split(_UNIT)[0]
    for sign in _PERCENT:
        text = text.replace(sign, "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    name, equals, value = text.partition("=")
    # `x = 3` is 3; longer left sides are equations, which are answers of their own.
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", "")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _HALF_SHORT_FRACTION.sub(r"\\frac{\1}{", text)
    if text == "0.5":
        return r"\frac{1}{2}"
    ratio = _INTEGER_RATIO.fullmatch(text)
    return rf"\frac{{{ratio[1]}}}{{{ratio[2]}}}" if ratio else text


def grade(response: str, truth: str) -> float:
    """1 where the last box holds the truth, else 0."""
    answer = last_boxed(response)
    return float(answer is not None and normalize(answer) == normalize(truth))


@compares_with(one_answer)
def score(item: RewardItem, truth: str) -> Outcome:
    """1.0 or 0.0; unscorable without a ground truth that is one answer, which may itself be boxed."""
    answer = last_boxed(item.response)
    read = "" if answer is None else normalize(answer)
    return Scored(grade(item.response, truth), {"format": float(answer is not None)}, answer=read)

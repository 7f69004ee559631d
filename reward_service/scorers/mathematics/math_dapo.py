r"""DAPO's rule for competition mathematics with integer answers: +1 or -1 (arXiv:2503.14476, sec. 4.1).

Only the last 300 characters count, so that answers must come at the end. The answer stands after the last `Answer:`
and is compared after Minerva's normalization (Lewkowycz et al., arXiv:2206.14858, app. D.1) as verl has it; without
that word, a `\boxed{}` with braces within the last 100 characters is compared as it is written. `strict_box` accepts
the box alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scorers.boxes import last_braced_box, one_answer
from rollmesh.reward_service.scorers.truths import compares_with

INVALID = "[INVALID]"
_TAIL = 300
_BOX_TAIL = 100
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
# fmt: off
_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges",
    "students", "childrentickets", "multiples",
)
_MARKS = (
    r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}", r"\mathrm{th}",
    r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)
# fmt: on
# One after the other, as what one leaves may be the next one's.
_WRAPPED = (
    re.compile(r"\\text\{(.*?)\}"),
    re.compile(r"\\textbf\{(.*?)\}"),
    re.compile(r"\\overline\{(.*?)\}"),
    re.compile(r"\\boxed\{(.*)\}"),
)
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a response.

    Attributes:
        correct: true if it is right.
        answer: the text taken as its answer; `INVALID`, or None for `strict_box`, without one.
    """

    correct: bool
    answer: str | None

    @property
    def total(self) -> float:
        """+1 or -1."""
        return 1.0 if self.correct else -1.0


def normalize(answer: str) -> str:
    """Minerva's normal form of an answer: without units, text and LaTeX layout."""
    answer = answer.rpartition("=")[2]
    for written, replacement in _SUBSTITUTIONS:
        answer = answer.replace(written, replacement)
    for word in (*_UNITS, *_MARKS):
        answer = answer.replace(word, "")
    answer = "\n".join(map(_in_dollars, answer.split("\n")))
    for wrapped in _WRAPPED:
        answer = wrapped.sub(r"\1", answer)
    answer = _SHORT_FRACTION.sub(r"frac{\1}{\2}", answer)
    answer = _SHORT_ROOT.sub(r"sqrt{\1}", answer).replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def _in_dollars(line: str) -> str:
    """The first formula of a line, with its dollars; the whole line without a formula."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line


def grade(response: str, truth: str, *, strict_box: bool = False) -> Grade:
    """Compares a response with the truth, as the module says."""
    tail = response[-_TAIL:]
    answers = [] if strict_box else _ANSWER.findall(tail)
    if answers:
        answer = normalize(answers[-1])
        return Grade(answer == normalize(truth), answer)
    boxed = last_braced_box(tail[-_BOX_TAIL:])
    if boxed is None:
        return Grade(False, None if strict_box else INVALID)
    return Grade(boxed == truth, boxed)


@compares_with(one_answer)
def score(item: RewardItem, truth: str) -> Outcome:
    """+1.0 or -1.0, with the component `acc` (1 or 0); unscorable without a ground truth that is one answer."""
    result = grade(item.response, truth)
    found = result.answer is not None and result.answer != INVALID
    # A box is compared as it is written, other answers in their normal form: those that are right are one.
    read = (normalize(truth) if result.correct else result.answer or "") if found else ""
    return Scored(result.total, {"acc": float(result.correct), "format": float(found)}, answer=read)

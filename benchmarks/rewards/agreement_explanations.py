"""The reasons for which kinds of pairs are graded otherwise: (scorer, grader, kind) -> the reason."""

from __future__ import annotations

_MARK = "verl takes the text after `#### ` literally; `gsm8k` reads it as a number"
_NO_MARK = "verl wants `#### `; `gsm8k` takes the last number where there is no mark, and says so in `format`"
_FAR = "verl reads the last 300 characters; `gsm8k` reads all"
_PRM800K = "PRM800K's rules: spellings are compared first, and few expressions are evaluated"
_LETTER = "NeMo Gym's lenient mode wants a capital letter in the box, or the option's text"
_FIRST_BOX = "NeMo Gym takes the first box; what comes last in the response counts here"
_NEW_PERCENT = "math-verify 0.9 lets a percentage equal its bare number; the pinned 0.8 does not"
_ANTLR = "with antlr 4.9.3, which hydra brings, math-verify parses no percentage"

EXPLANATIONS: dict[tuple[str, str, str], str] = {
    **{("gsm8k", "verl gsm8k", kind): _MARK for kind in ("decimals", "full stop", "money", "marked without a space")},
    **{("gsm8k", "verl gsm8k", kind): _NO_MARK for kind in ("no mark", "boxed")},
    ("gsm8k", "verl gsm8k", "mark far from the end"): _FAR,
    **{("math", grader, "percent for its value"): _ANTLR for grader in ("verl math_verify", "math-verify")},
    **{("math", grader, "percent, sign missing"): _NEW_PERCENT for grader in ("math-verify", "TRL accuracy")},
    ("math", "TRL accuracy", "fraction without braces"): "TRL turns off math-verify's repair of malformed operators",
    **{
        ("math", "verl prime_math", kind): _PRM800K
        for kind in (
            "fraction not reduced",
            "set in another order",
            "list in another order",
            "power",
            "scientific",
        )
    },
    ("math", "verl prime_math", "percent, sign missing"): "prime_math drops the percent sign of both sides",
    **{("choice", "NeMo Gym mcqa", kind): _LETTER for kind in ("boxed, lower case", "boxed as text")},
    ("choice", "NeMo Gym mcqa", "announced"): "NeMo Gym's boxed modes read boxes alone",
    **{
        ("choice", "NeMo Gym mcqa", kind): _FIRST_BOX
        for kind in ("two boxes, the last right", "two boxes, the first right")
    },
}

"""Pairs of a response and its ground truth, drawn from a seed: what models write, right and wrong, by kinds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Pair:
    """A response with its ground truth.

    Attributes:
        kind: how the two differ.
        extra: fields of the row beside them.
    """

    kind: str
    response: str
    truth: str
    extra: dict[str, Any] = field(default_factory=dict)


def pairs(family: str, each: int, seed: int) -> list[Pair]:
    """Draws pairs of a family, `each` of every kind.

    Args:
        family: gsm8k, math, dapo, qa, choice or code.
    """
    rng = Random(f"{family} {seed}")
    return [pair for _ in range(each) for pair in _FAMILIES[family](rng)]


def _gsm8k(rng: Random) -> Iterator[Pair]:
    number = rng.randint(1000, 99999) * rng.choice((1, 1, 1, -1))
    text, other = str(number), str(number + rng.randint(1, 9))
    work = f"First {rng.randint(1, 9)} + {rng.randint(1, 9)}. "
    spelled = {
        "marked": f"#### {text}",
        "marked, wrong": f"#### {other}",
        "thousands": f"#### {number:,}",
        "decimals": f"#### {text}.00",
        "full stop": f"#### {text}.",
        "money": f"#### ${text}",
        "unit": f"#### {text} dollars",
        "marked without a space": f"####{text}",
        "two marks, the last right": f"#### {other}\n#### {text}",
        "two marks, the first right": f"#### {text}\n#### {other}",
        "no mark": f"So the answer is {text}.",
        "no mark, wrong": f"So the answer is {other}.",
        "no number": "I cannot tell.",
        "mark far from the end": f"#### {text}\n" + "That is it. " * 40,
        "boxed": f"The result is \\boxed{{{text}}}",
    }
    for kind, answer in spelled.items():
        yield Pair(kind, work + answer, text)


def _math_values(rng: Random) -> Iterator[tuple[str, str, str]]:
    """(kind, what is in the box, truth)."""
    a, b = rng.randint(2, 40), rng.randint(3, 90)
    p, q = rng.choice(((1, 2), (3, 4), (2, 5), (7, 8), (9, 20)))
    big = rng.randint(1000, 99999)
    yield "integer", f"{b}", f"{b}"
    yield "integer, wrong", f"{b}", f"{b + 1}"
    yield "fraction", f"\\frac{{{p}}}{{{q}}}", f"\\frac{{{p}}}{{{q}}}"
    yield "fraction spelled otherwise", f"\\dfrac{{{p}}}{{{q}}}", f"\\frac{{{p}}}{{{q}}}"
    yield "fraction without braces", f"\\frac{p}{a % 7 + 3}", f"\\frac{{{p}}}{{{a % 7 + 3}}}"
    yield "fraction not reduced", f"\\frac{{{2 * p}}}{{{2 * q}}}", f"\\frac{{{p}}}{{{q}}}"
    yield "slash for a fraction", f"{p}/{q}", f"\\frac{{{p}}}{{{q}}}"
    yield "decimal for a fraction", f"{p / q}", f"\\frac{{{p}}}{{{q}}}"
    yield "percent for its value", f"{100 * p // q}\\%", f"{(100 * p // q) / 100}"
    yield "percent, sign missing", f"{a}", f"{a}\\%"
    yield "percent, both", f"{a}\\%", f"{a}\\%"
    yield "interval", f"({a}, {a + b}]", f"({a},{a + b}]"
    yield "interval, wrong bracket", f"({a}, {a + b})", f"[{a}, {a + b})"
    yield "interval, half infinite", f"[{a}, \\infty)", f"[{a},\\infty)"
    yield "set in another order", f"\\{{{a}, {a + 1}\\}}", f"\\{{{a + 1}, {a}\\}}"
    yield "list in another order", f"{a}, {a + 1}", f"{a + 1}, {a}"
    yield "pair", f"({a}, {b})", f"({a},{b})"
    yield "pair, swapped", f"({a}, {a + b})", f"({a + b}, {a})"
    yield "unit in words", f"{a} \\text{{ cm}}", f"{a}"
    yield "unit in the truth", f"{a}", f"{a}\\text{{ cm}}"
    yield "degrees", f"{a}^\\circ", f"{a}"
    yield "thousands", f"{big:,}".replace(",", "{,}"), f"{big}"
    yield "thousands, plain comma", f"{big:,}", f"{big}"
    yield "money", f"\\${a}", f"{a}"
    yield "root simplified", f"{a}\\sqrt{{3}}", f"\\sqrt{{{3 * a * a}}}"
    yield "root", f"{a}\\sqrt{{3}}", f"{a}\\sqrt{{3}}"
    yield "power", f"2^{{{a % 12 + 3}}}", f"{2 ** (a % 12 + 3)}"
    yield "scientific", f"{a / 10}\\times 10^{{3}}", f"{a * 100}"
    yield "pi", f"{a}\\pi", f"\\pi \\cdot {a}"
    yield "sum in another order", f"x + {a}", f"{a} + x"
    yield "polynomial expanded", f"x^2 + {2 * a}x + {a * a}", f"(x+{a})^2"
    yield "equation for a value", f"x = {a}", f"{a}"
    yield "text", "\\text{even}", "\\text{even}"
    yield "text without its command", "even", "\\text{even}"
    yield "negative", f"-{a}", f"-{a}"
    yield "sign wrong", f"{a}", f"-{a}"
    yield "decimals more", f"{a}.0", f"{a}"
    yield "decimal without zero", ".5", "0.5"
    yield "left and right", f"\\left({a}, {b}\\right)", f"({a},{b})"
    matrix = f"\\begin{{pmatrix}} {a} & {b} \\\\ 1 & 0 \\end{{pmatrix}}"
    yield "matrix", matrix, matrix.replace(" ", "").replace("matrix}", "matrix} ", 1)


def _math(rng: Random) -> Iterator[Pair]:
    for kind, answer, truth in _math_values(rng):
        yield Pair(kind, f"We find the value. Therefore $\\boxed{{{answer}}}$.", truth)
    right, wrong = str(rng.randint(2, 900)), str(rng.randint(901, 999))
    yield Pair("two boxes, the last right", f"$\\boxed{{{wrong}}}$, no, $\\boxed{{{right}}}$", right)
    yield Pair("two boxes, the first right", f"$\\boxed{{{right}}}$, no, $\\boxed{{{wrong}}}$", right)
    yield Pair("no box", f"The answer is ${right}$.", right)
    yield Pair("no answer", "I do not know.", right)
    yield Pair("box not closed", f"So $\\boxed{{{right}", right)


def _dapo(rng: Random) -> Iterator[Pair]:
    number = rng.randint(1000, 9999)
    right, wrong = str(number), str(number + 1)
    spelled = {
        "announced": f"Answer: {right}",
        "announced, wrong": f"Answer: {wrong}",
        "in dollars": f"Answer: ${right}$",
        "boxed after it": f"Answer: $\\boxed{{{right}}}$",
        "in lower case": f"answer: {right}",
        "bold": f"**Answer:** {right}",
        "without a space": f"Answer:{right}",
        "thousands": f"Answer: {number:,}",
        "decimals": f"Answer: {right}.0",
        "unit": f"Answer: {right} \\text{{ cm}}",
        "unit, plain": f"Answer: {right} cm",
        "degrees": f"Answer: {right}^\\circ",
        "equation": f"Answer: x = {right}",
        "full stop": f"Answer: {right}.",
        "two answers, the last right": f"Answer: {wrong}\nAnswer: {right}",
        "two answers, the first right": f"Answer: {right}\nAnswer: {wrong}",
        "box alone": f"So it is $\\boxed{{{right}}}$",
        "box alone, wrong": f"So it is $\\boxed{{{wrong}}}$",
        "box without braces": f"So it is $\\boxed {right}$",
        "answer wrong, box right": f"So $\\boxed{{{right}}}$.\nAnswer: {wrong}",
        "nothing": f"It may be {right}",
        "far from the end": f"Answer: {right}\n" + "That is it. " * 40,
    }
    for kind, answer in spelled.items():
        yield Pair(kind, f"Let me think.\n{answer}", right)


_NAMES = ("Paris", "the Nile", "Ada Lovelace", "42", "South Korea", "an apple", "yes", "U.S. Senate")


def _qa(rng: Random) -> Iterator[Pair]:
    right = rng.choice(_NAMES)
    wrong = rng.choice([name for name in _NAMES if name != right])
    spelled = {
        "same": f"<answer>{right}</answer>",
        "wrong": f"<answer>{wrong}</answer>",
        "upper case": f"<answer>{right.upper()}</answer>",
        "white space": f"<answer>\n  {right} \n</answer>",
        "punctuation": f"<answer>{right}!</answer>",
        "article": f"<answer>the {right}</answer>",
        "more words": f"<answer>{right} of course</answer>",
        "no tags": f"It is {right}.",
        "not closed": f"<answer>{right}",
        "two answers, the last right": f"<answer>{wrong}</answer> <answer>{right}</answer>",
        "two answers, the first right": f"<answer>{right}</answer> <answer>{wrong}</answer>",
        "opened twice": f"<answer><answer>{right}</answer>",
        "twelve answers": f"<answer>{right}</answer>" * 12,
        "empty": "<answer></answer>",
    }
    for kind, answer in spelled.items():
        yield Pair(kind, f"<think>Hm.</think> {answer}", right)


def _choice(rng: Random) -> Iterator[Pair]:
    texts = rng.sample(("red stone", "blue river", "green hill", "old tower", "wide field"), 4)
    labels = "ABCD"
    options = [{label: text} for label, text in zip(labels, texts, strict=True)]
    place = rng.randrange(4)
    right, wrong = labels[place], labels[(place + 1) % 4]
    spelled = {
        "boxed": f"\\boxed{{{right}}}",
        "boxed, wrong": f"\\boxed{{{wrong}}}",
        "boxed, lower case": f"\\boxed{{{right.lower()}}}",
        "boxed as text": f"\\boxed{{\\text{{{right}}}}}",
        "boxed in brackets": f"\\boxed{{({right})}}",
        "boxed with its text": f"\\boxed{{{right}. {texts[place]}}}",
        "text boxed": f"\\boxed{{{texts[place]}}}",
        "announced": f"Answer: {right}",
        "announced, wrong": f"Answer: {wrong}",
        "two boxes, the last right": f"\\boxed{{{wrong}}} or rather \\boxed{{{right}}}",
        "two boxes, the first right": f"\\boxed{{{right}}} or rather \\boxed{{{wrong}}}",
        "two choices in a box": f"\\boxed{{{right}, {wrong}}}",
        "none": "I cannot tell.",
    }
    for kind, answer in spelled.items():
        yield Pair(kind, f"Let us see. {answer}", right, {"options": options})


_FENCE = "```python\n{}\n```"


def _code(rng: Random) -> Iterator[Pair]:
    """Programs that add a constant, with the tests of APPS."""
    add = rng.randint(1, 99)
    inputs = [rng.randint(1, 999) for _ in range(4)]
    read = json.dumps({"inputs": [f"{n}\n" for n in inputs], "outputs": [f"{n + add}\n" for n in inputs]})
    call = json.dumps({"fn_name": "f", "inputs": [f"{n}" for n in inputs], "outputs": [f"{n + add}" for n in inputs]})
    halves = json.dumps({"inputs": [f"{n}\n" for n in inputs], "outputs": [f"{n + add / 2}\n" for n in inputs]})
    right = f"print(int(input()) + {add})"
    written = {
        "right": right,
        "wrong": f"print(int(input()) - {add})",
        "right in part": f"n = int(input())\nprint(n + {add} if n != {inputs[0]} else n)",
        "raises": f"{right}\nraise ValueError",
        "raises at once": "raise ValueError",
        "no Python": "print(int(input()) +",
        "ends with 0": f"{right}\nimport sys\nsys.exit(0)",
        "spaces and an empty row": f"print(' ', int(input()) + {add}, ' ')\nprint()",
        "other words in front": f"print('answer', int(input()) + {add})",
        "reads all input": f"import sys\nprint(int(sys.stdin.read()) + {add})",
        "in a function": f"def main():\n    {right}\n\nif __name__ == '__main__':\n    main()",
        "names without imports": f"x: List[int] = [int(input())]\nprint(x[0] + {add})",
        "writes nothing": "int(input())",
    }
    for kind, program in written.items():
        yield Pair(kind, f"So:\n{_FENCE.format(program)}", read)
    yield Pair("without a fence", right, read)
    yield Pair("two programs, the last right", f"{_FENCE.format('print(1)')}\nNo:\n{_FENCE.format(right)}", read)
    yield Pair("numbers with decimals", _FENCE.format(f"print(int(input()) + {add / 2})"), halves)
    yield Pair("more digits", _FENCE.format(f"print(f'{{int(input()) + {add / 2}:.3f}}')"), halves)
    yield Pair("function", _FENCE.format(f"def f(n):\n    return n + {add}"), call)
    yield Pair("method", _FENCE.format(f"class Solution:\n    def f(self, n):\n        return n + {add}"), call)
    yield Pair("function, wrong", _FENCE.format("def f(n):\n    return n"), call)
    yield Pair("function of another name", _FENCE.format(f"def g(n):\n    return n + {add}"), call)


_FAMILIES: dict[str, Callable[[Random], Iterator[Pair]]] = {
    "gsm8k": _gsm8k,
    "math": _math,
    "dapo": _dapo,
    "qa": _qa,
    "choice": _choice,
    "code": _code,
}

"""Pictures of squares of one color, and questions about them, as dataset rows with verl's fields.

Some rows ask about no picture, so that batches are mixed. Invariant: the same seed gives the same rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIDE = 32
"""Pixels of a picture, in height and width."""
COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "yellow": (230, 210, 40)}
NUMBERS = ("one", "two", "three", "four")
MARK = "<image>"
_CELL = 8
_BACKGROUND = (24, 24, 24)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the one response that is right.

    Attributes:
        kind: `count`, `color` or `words`.
        prompt: with the mark of a picture, but for `words`.
        answer: a word.
        cells: of the squares, as numbers of the grid's cells; empty without a picture.
        color: of the squares.
    """

    kind: str
    prompt: str
    answer: str
    cells: tuple[int, ...] = ()
    color: str = ""

    def draw(self) -> Image.Image:
        """The picture."""
        picture = Image.new("RGB", (SIDE, SIDE), _BACKGROUND)
        brush = ImageDraw.Draw(picture)
        for cell in self.cells:
            top, left = (_CELL * place for place in divmod(cell, SIDE // _CELL))
            brush.rectangle((left + 1, top + 1, left + _CELL - 2, top + _CELL - 2), fill=COLORS[self.color])
        return picture

    def row(self, index: int, folder: Path, split: str) -> dict[str, Any]:
        """The question as a dataset row; its picture is written into the folder and named by its path."""
        images = []
        if self.cells:
            path = Path("pictures") / f"{split}-{index}.png"
            self.draw().save(folder / path)
            images = [str(path)]
        return {
            "data_source": f"examples/vision/{self.kind}",
            "prompt": self.prompt,
            "images": images,
            "ability": "vision",
            "reward_model": {"style": "rule", "ground_truth": self.answer},
            "extra_info": {"split": split},
        }


def questions(rng: random.Random) -> Iterator[Question]:
    """Questions without end: half of them count, others ask for a color, and a few need no picture."""
    while True:
        kind = rng.choices(("count", "color", "words"), (4, 3, 1))[0]
        count = rng.randint(1, len(NUMBERS))
        if kind == "words":
            yield Question(kind, f"{count}?", NUMBERS[count - 1])
            continue
        cells = tuple(rng.sample(range((SIDE // _CELL) ** 2), count))
        color = rng.choice(sorted(COLORS))
        asked, answer = ("number", NUMBERS[count - 1]) if kind == "count" else ("color", color)
        yield Question(kind, f"{MARK}{asked}?", answer, cells, color)

"""Tools and environments as users write them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

# Lets tests hold a tool back, and see that it was reached.
REACHED, LET_GO = threading.Event(), threading.Event()


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def shout(text: str) -> str:
    """Says it louder.

    Args:
        text: what to say.
    """
    await asyncio.sleep(0)
    return text.upper()


def fail(text: str) -> str:
    """Always fails.

    Args:
        text: anything.
    """
    raise ValueError(text)


def block() -> str:
    """Does not come back before it is let go."""
    REACHED.set()
    LET_GO.wait(60)
    return "late"


async def block_loop() -> str:
    """Blocks the loop that it runs on."""
    time.sleep(1.2)
    return "late"


def no_hints(a):  # type: ignore[no-untyped-def]
    """No type hint.

    Args:
        a: it.
    """
    return a


class Countdown:
    """Own form: say the number that is shown, until 0; then the reward is the number of right ones."""

    def reset(self, start: int = 2) -> str:
        self.left = start
        return f" Start at {start}."

    def step(self, action: str) -> tuple[str, float, bool]:
        if action.strip() == "break":
            raise RuntimeError("the game has crashed")
        right = action.strip() == str(self.left)
        self.left -= 1
        return f"next: {self.left}", float(right), self.left == 0


class Gym:
    """Gymnasium's returns, async methods, and a reward with components."""

    async def reset(self, **row: Any) -> tuple[str, dict[str, Any]]:
        self.row = row
        return "", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "more", 0.0, False, action == "the end", {}

    def reward(self) -> dict[str, float]:
        return {"length": 1.0, "seed": float(self.row["seed"] > 0)}


class Counter:
    """TRL's form."""

    def __init__(self) -> None:
        self.count = 0
        self.reward = 0.0

    def reset(self, target: int = 3, **kwargs: Any) -> str | None:
        self.target, self.count, self.reward = target, 0, 0.0
        return f"Reach {target}."

    def increment(self, by: int) -> int:
        """Adds to the counter.

        Args:
            by: how much.

        Returns:
            The counter.
        """
        if by < 0:
            raise ValueError("only up")
        self.count += by
        self.reward = float(self.count == self.target)
        return self.count

    def _helper(self) -> None: ...


class Scored:
    """TRL's form, with a reward of its own method."""

    def reset(self) -> None:
        return None

    def wave(self) -> str:
        """Waves."""
        return "hello"

    def get_reward(self) -> float:
        return 0.25


class Slow:
    """TRL's form, with a method that hangs."""

    counted = 0

    def reset(self) -> None:
        return None

    def count(self) -> int:
        """Counts."""
        type(self).counted += 1
        return self.counted

    def hang(self) -> str:
        """Does not come back before it is let go."""
        return block()


class Moody(Countdown):
    """Never says the same thing twice."""

    starts = 0

    def reset(self, start: int = 2) -> str:
        type(self).starts += 1
        return f"{super().reset(start)} Game {type(self).starts}."


class Broken:
    """Cannot begin."""

    def reset(self) -> str:
        raise ConnectionError("no server")

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 0.0, True

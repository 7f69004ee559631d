"""Long random walks over the commands of both machines, weighted so that groups get somewhere."""

from __future__ import annotations

import random
from collections.abc import Callable

from rollmesh.buffer.policy.rules import Order
from tests.buffer.both_machines import BothMachines
from tests.buffer.comparison import COUNTED, HOLDERS, MEMBERS

# Walks that come upon everything that any walk should, and among which one misses each rule of `tests.buffer.rules`.
TELLING = (0, 5, 3, 2, 6, 7, 17, 13, 1)
WEIGHTS = {
    "fill": 4,
    "finish_group": 8,
    "train_batch": 7,
    "write_current": 4,
    "admit": 4,
    "sample": 4,
    "claim": 4,
    "claim_one_twice": 2,
    "claim_more": 2,
    "late_copy": 8,
    "write_without_the_lease": 2,
    "attach": 2,
    "detach": 2,
    "outdate": 2,
    "nack": 5,
    "draft_current": 4,
    "lose_holders": 3,
    "name": 2,
}


def random_walk(seed: int, steps: int, *, compare_every: int = 1) -> set[str]:
    """Takes weighted random commands, comparing after each; returns the reasons and states that came up."""
    rng = random.Random(seed)
    both = BothMachines()
    # Every fourth walk is through the table without a bound, that of evaluation.
    bounded = seed % 4 != 3
    both.begin(rng.randrange(3), rng.choice(list(Order)), rng.randint(1, 3), rng.choice([1 << 30, 450]), bounded)
    commands: list[tuple[str, Callable[[], None]]] = [
        ("time_passes", lambda: both.time_passes(rng.choice([1, 150, 400, 1100]))),
        ("seed", lambda: both.seed(rng.randint(0, 4), rng.random() < 0.5, rng.random() < 0.3, rng.random() < 0.1)),
        ("admit", lambda: both.admit(rng.choice(MEMBERS), rng.randrange(3), rng.randint(1, 5))),
        ("fill", lambda: both.fill(rng.randint(1, 6), rng.choice(MEMBERS))),
        ("finish_group", lambda: both.finish_group(rng.randrange(30), rng.randrange(3))),
        ("fail_group", lambda: both.fail_group(rng.randrange(30))),
        ("lose_holders", both.lose_holders),
        ("train_batch", lambda: both.train_batch(rng.randint(1, 3), rng.random() < 0.8, rng.choice([0] * 6 + [-1, 1]))),
        (
            "write_current",
            lambda: both.write_current(
                rng.randrange(30), rng.randrange(3), rng.random() < 0.6, [rng.randrange(4), rng.randrange(4)]
            ),
        ),
        (
            "draft_current",
            lambda: both.draft_current(
                rng.randrange(30), rng.randrange(3), rng.randint(1, 9), [rng.randrange(4), rng.randrange(4)]
            ),
        ),
        ("draft_any", lambda: both.draft_any(rng.randrange(30), rng.randrange(2), 5) if both.old else None),
        ("read_cancels", lambda: both.read_cancels(rng.choice(MEMBERS), rng.random() < 0.7)),
        ("redrive", lambda: both.redrive(rng.randrange(9), rng.randint(1, 3))),
        ("leave_and_come_back", lambda: both.leave_and_come_back(rng.choice(MEMBERS))),
        ("write_any", lambda: both.write_any(rng.randrange(30), rng.randrange(2), [0]) if both.old else None),
        ("sample", lambda: both.sample(rng.randrange(-1, 2), rng.randint(1, 3), rng.randrange(30))),
        ("outdate", both.outdate),
        ("claim", lambda: both.claim(rng.choice([0, 0, -1, 1]), rng.random() < 0.25, rng.randrange(2))),
        ("claim_one_twice", lambda: both.claim_one_twice(rng.randrange(30))),
        ("claim_again", lambda: both.claim_again(rng.randrange(30), rng.randrange(2)) if both.claimed else None),
        (
            "claim_more",
            lambda: both.claim_more(rng.randrange(30), rng.randrange(30)) if both.claimed else None,
        ),
        ("late_copy", lambda: both.late_copy(rng.randrange(10_000))),
        ("payload_is_gone", lambda: both.payload_is_gone(rng.randrange(30))),
        ("prioritize", lambda: both.prioritize(rng.randrange(30), rng.choice([0.01, 0.5, 1.0, 30.0]))),
        ("publish", both.publish),
        ("nack", lambda: both.nack(rng.randrange(30), rng.choice(["release", "filter", "fail"]))),
        ("commit", lambda: both.commit(rng.randrange(3))),
        ("take_over", lambda: both.take_over(rng.randrange(4))),
        ("fences_hold", both.fences_hold),
        ("write_without_the_lease", lambda: both.write_without_the_lease(rng.randrange(30))),
        ("release", lambda: both.release(rng.randrange(30))),
        ("attach", lambda: both.attach(rng.choice(HOLDERS))),
        ("detach", lambda: both.detach(rng.choice(HOLDERS))),
        ("name", lambda: both.name(rng.choice(HOLDERS), rng.randrange(30), rng.randrange(30))),
        ("heartbeat", lambda: both.heartbeat(rng.choice(HOLDERS))),
        ("evict", both.evict),
        ("expire", both.expire),
    ]
    weights = [WEIGHTS.get(name, 1) for name, _ in commands]
    try:
        for step in range(steps):
            # Now and then, and for a few steps, nothing may be admitted with bound 0.
            if step % 10 in (7, 9):
                both.evaluate(step % 10 == 7)
            rng.choices(commands, weights)[0][1]()
            if step % compare_every == 0:
                both.agree()
        both.make_progress()
        both.agree()
        counts = both.machine.counts
        return {*both.seen, *both.machine.reasons, *(name for name in COUNTED if counts[name])}
    finally:
        both.teardown()

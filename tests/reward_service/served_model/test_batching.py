"""The choice of batches: bounded, by length, oldest first."""

from __future__ import annotations

import random

from rollmesh.reward_service.served_model.batching import Choice, Waiting, next_batch


def waiting(*lengths: int, since: float = 0.0) -> list[Waiting]:
    return [Waiting(key, tokens, since) for key, tokens in enumerate(lengths)]


def chosen(*lengths: int, now: float = 1.0, max_tokens: int = 100) -> list[int]:
    choice = next_batch(waiting(*lengths), now, max_tokens=max_tokens, max_wait_s=0.5)
    return [lengths[key] for key in choice.keys]


def test_neighbours_in_length_go_with_the_first_whatever_their_order() -> None:
    assert chosen(10, 50, 12, 200, 9) == [9, 10, 12]
    assert chosen(50, 10, 12, 9) == [50]
    assert chosen(12, 9, 10, 50) == chosen(12, 50, 10, 9) == [9, 10, 12]


def test_a_batch_that_is_not_full_waits_for_others_and_a_full_one_does_not() -> None:
    few = waiting(10, 10)
    choice = next_batch(few, 0.1, max_tokens=100, max_wait_s=0.5)
    assert not choice.keys
    assert choice.wait_s == 0.4
    assert next_batch(few, 0.5, max_tokens=100, max_wait_s=0.5).keys == (0, 1)
    full = next_batch(waiting(*[10] * 11), 0.0, max_tokens=100, max_wait_s=0.5)
    assert len(full.keys) == 10
    assert next_batch(waiting(300), 0.0, max_tokens=100, max_wait_s=0.5) == Choice((0,))


def test_a_suspect_gets_a_pass_of_its_own() -> None:
    first = [Waiting(0, 10, 0.0, alone=True), *(Waiting(key, 10, 0.0) for key in (1, 2))]
    assert next_batch(first, 0.0, max_tokens=100, max_wait_s=0.5).keys == (0,)
    later = [Waiting(1, 10, 0.0), Waiting(0, 10, 0.0, alone=True), Waiting(2, 10, 0.0)]
    assert next_batch(later, 1.0, max_tokens=100, max_wait_s=0.5).keys == (1, 2)


def test_any_queue_is_emptied_in_bounded_batches_with_little_padding() -> None:
    numbers = random.Random(0)
    for _ in range(50):
        lengths = [numbers.randint(1, 64) for _ in range(numbers.randint(1, 60))]
        queue = waiting(*lengths)
        while queue:
            keys = next_batch(queue, 9.0, max_tokens=100, max_wait_s=0.5).keys
            batch = [lengths[key] for key in keys]
            assert queue[0].key in keys
            assert len(batch) == 1 or len(batch) * max(batch) <= 100
            assert sum(batch) * 2 >= len(batch) * max(batch)
            queue = [each for each in queue if each.key not in keys]

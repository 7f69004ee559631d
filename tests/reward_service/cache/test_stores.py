"""Stores of scores: what both promise, memory by bytes, and a Redis that is there, slow, foreign or gone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.config.redis_url import RedisAddress
from rollmesh.mesh.config.scorers.cache import CacheSection
from rollmesh.reward_service.cache import values
from rollmesh.reward_service.cache.memory import MemoryStore
from rollmesh.reward_service.cache.redis_store import RedisStore
from rollmesh.reward_service.outcomes import Failed, Scored, Unscorable
from rollmesh.reward_service.workers.messages import pack, pack_answer

PATIENT_S = 60.0


class Memory:
    """The store in memory, in the form of the one in Redis."""

    def __init__(self) -> None:
        self._store = MemoryStore(1 << 20)

    async def get(self, keys: list[bytes]) -> list[bytes | None]:
        return [self._store.get(key) for key in keys]

    def put(self, key: bytes, value: bytes) -> None:
        self._store.put(key, value)

    async def flush(self) -> None:
        """Nothing is under way."""

    async def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis_section: CacheSection) -> AsyncIterator[Memory | RedisStore]:
    made: Memory | RedisStore = Memory()
    if request.param == "redis":
        assert redis_section.address is not None
        made = RedisStore(redis_section.address, timeout_s=PATIENT_S, ttl_s=3600)
    yield made
    await made.close()


async def test_a_store_gives_back_what_was_put_last(store: Memory | RedisStore) -> None:
    keys = [os.urandom(32) for _ in range(3)]
    assert await store.get(keys) == [None, None, None]
    store.put(keys[0], b"one")
    store.put(keys[2], b"")
    await store.flush()
    store.put(keys[0], b"two")
    await store.flush()
    assert await store.get(keys) == [b"two", None, b""]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 400), st.booleans()), max_size=60))
def test_memory_holds_the_most_recent_within_its_bytes(steps: list[tuple[int, int, bool]]) -> None:
    store = MemoryStore(2000)
    order: list[int] = []
    sizes: dict[int, int] = {}
    for name, size, puts in steps:
        key = bytes([name])
        if puts:
            store.put(key, b"v" * size)
            sizes[name] = size
        elif store.get(key) is None:
            continue
        order = [each for each in order if each != name] + [name]
    assert store.bytes <= 2000
    kept = [name for name in dict.fromkeys(order) if store.get(bytes([name])) is not None]
    assert kept == order[len(order) - len(kept) :]
    assert len(store) == len(kept)
    assert all(store.get(bytes([name])) == b"v" * sizes[name] for name in kept)


def test_a_value_larger_than_the_memory_is_not_kept() -> None:
    store = MemoryStore(1000)
    store.put(b"a", b"1")
    store.put(b"b", b"2" * 1000)
    assert (store.get(b"a"), store.get(b"b")) == (b"1", None)
    store.put(b"a", b"2" * 1000)
    assert store.get(b"a") is None
    assert store.bytes == 0


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.builds(Scored, NUMBERS, st.dictionaries(st.text(), NUMBERS), st.lists(NUMBERS), st.just([]), st.text(), NUMBERS)
)
def test_a_score_comes_back_as_one_that_was_found_earlier(scored: Scored) -> None:
    try:
        value = values.pack(scored)
    except UnicodeEncodeError:
        return
    found = values.unpack(value)
    if isinstance(found, Scored):
        assert found == replace(scored, cost=0.0, cached=True)


@given(st.binary() | st.builds(lambda n: pack_answer([Scored(n)]), st.sampled_from([float("nan"), float("inf")])))
def test_bytes_of_others_are_no_score(value: bytes) -> None:
    found = values.unpack(value)
    assert found is None or value == pack_answer([found])


def test_errors_and_other_numbers_of_outcomes_are_no_score() -> None:
    assert values.unpack(values.pack(Unscorable("why"))) == Unscorable("why")
    for value in (pack_answer([Failed("a", "b")]), pack_answer([]), pack_answer([Scored(1.0)] * 2), pack([[0, 1.0]])):
        assert values.unpack(value) is None


async def test_a_redis_that_is_gone_is_asked_rarely_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = RedisStore(RedisAddress(path=str(tmp_path / "no.sock")), timeout_s=PATIENT_S, ttl_s=60)
    with caplog.at_level(logging.INFO, logger="rollmesh.reward_service.cache"):
        for _ in range(50):
            assert await store.get([b"k"]) == [None]
            store.put(b"k", b"v")
        await store.flush()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert store.failures < 10
    await store.close()


async def test_the_first_question_has_time_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.reward_service.cache.redis_store._OPENING_S", PATIENT_S)
    asked, timeout_s = 0, 0.05

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while data := await reader.read(4096):
            if b"MGET" not in data:
                writer.write(b"+OK\r\n" * data.count(b"*"))
                continue
            asked += 1
            if asked == 1:
                # Longer than a question may take, by the same loop's clock.
                await asyncio.sleep(4 * timeout_s)
                writer.write(b"*1\r\n$1\r\nv\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = RedisStore(RedisAddress(hosts=(("127.0.0.1", port),)), timeout_s=timeout_s, ttl_s=60)
    assert await store.get([b"k"]) == [b"v"]
    # By now the question alone has its time.
    assert await store.get([b"k"]) == [None]
    assert (asked, store.failures) == (2, 1)
    await store.close()
    server.close()


async def test_an_answer_of_another_length_is_none() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(b"*1\r\n$1\r\nv\r\n" if b"MGET" in data else b"+OK\r\n" * data.count(b"*"))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = RedisStore(RedisAddress(hosts=(("127.0.0.1", port),)), timeout_s=PATIENT_S, ttl_s=60)
    assert await store.get([b"k", b"l"]) == [None, None]
    assert store.failures == 1
    await store.close()
    server.close()


async def test_a_redis_that_does_not_answer_keeps_no_one_and_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    held: list[asyncio.StreamWriter] = []
    answers = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        while data := await reader.read(4096):
            if answers.is_set():
                writer.write(b"*1\r\n$1\r\nv\r\n" if b"MGET" in data else b"+OK\r\n" * data.count(b"*"))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = RedisStore(RedisAddress(hosts=(("127.0.0.1", port),)), timeout_s=0.2, ttl_s=60)
    async with asyncio.timeout(50):
        assert await store.get([b"k"]) == [None]
        answers.set()
        with caplog.at_level(logging.INFO, logger="rollmesh.reward_service.cache"):
            while await store.get([b"k"]) != [b"v"]:
                await asyncio.sleep(0.05)
        assert "answers again" in caplog.text
        await store.close()
        for writer in held:
            writer.close()
        server.close()

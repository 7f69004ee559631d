"""Jobs over requests to a scripted server: each token is told once, in order, with its version, through updates, aborts
and late events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generators.engines.errors import EngineError, RequestError
from rollmesh.generators.engines.external.backend import DecodeChunk, DecodeJob
from rollmesh.generators.engines.external.served_adapters import LiveAdapter, ServedAdapters
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.generators.engines.sglang.http_client import LostError, RefusedError
from rollmesh.generators.engines.sglang.request_streams import RequestStreams
from rollmesh.generators.engines.sglang.streamed_job import REVEAL_TOKENS
from rollmesh.generators.engines.types import SamplingParams
from rollmesh.mesh.errors import PayloadError
from tests.generators.engines.sglang.scripted_server import CAN, ScriptedServer
from tests.generators.engines.tiny import train_tokenizer

PROMPT = [0, 1, 2, 3, 4]
# Token ids are places in the sequence: none of these is sampled where a test does not mean it.
GRAMMAR = 'start: "a"'
LIMITS = RequestLimits(context=1024, vocabulary=1024, eos=frozenset({1000}))


class Stage:
    """Jobs, and the server that they run on."""

    def __init__(self, eos: frozenset[int] = LIMITS.eos, tokenizer: Any = None, *, grammars: bool = True) -> None:
        self.server = ScriptedServer("v0")
        limits = RequestLimits(LIMITS.context, LIMITS.vocabulary, eos)
        self.adapters = ServedAdapters()
        can = replace(CAN, grammars=grammars)
        self.runs = RequestStreams(self.server, can, limits, tokenizer, self.adapters)  # type: ignore[arg-type]  # what it uses of a client
        self.runs.end_update("v0")
        self.chunks: dict[str, list[DecodeChunk]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.updates = 0

    async def begin(self, name: str = "a", max_tokens: int = 10, **sampling: Any) -> None:
        """Begins a job."""
        prompt = [PROMPT[0] + len(self.tasks), *PROMPT[1:]]
        job = DecodeJob(name, prompt, SamplingParams(max_tokens=max_tokens, **sampling))
        self.chunks[name] = []
        self.tasks[name] = asyncio.create_task(self.runs.generate(job, self.chunks[name].append))
        await settled()

    async def sample(self, count: int = 1, *, late: bool = False) -> None:
        """Lets every request sample, one event."""
        self.server.sample(count, late=late)
        await settled()

    async def update(self, *, recompute: bool = False) -> None:
        """The next version comes into service."""
        self.runs.begin_update(recompute=recompute)
        await settled()
        self.updates += 1
        self.server.label = f"v{self.updates}"
        self.runs.end_update(self.server.label)
        await settled()

    async def ended(self) -> None:
        """Lets all jobs end."""
        async with asyncio.timeout(180):
            await asyncio.gather(*self.tasks.values())
            await self.runs.close()

    def told(self, name: str = "a") -> list[tuple[int, str]]:
        """(token, version) of a job."""
        found = []
        for chunk in self.chunks[name]:
            labels = [label for length, label in chunk.versions for _ in range(length)]
            assert len(chunk.token_ids) == len(chunk.log_probs) == len(labels)
            assert [-float(token) for token in chunk.token_ids] == list(chunk.log_probs)
            found += zip(chunk.token_ids, labels, strict=True)
        return found

    def finish(self, name: str = "a") -> str | None:
        """The reason why a job has ended, as its last chunk alone says."""
        assert all(chunk.finish is None for chunk in self.chunks[name][:-1])
        return self.chunks[name][-1].finish if self.chunks[name] else None


async def settled() -> None:
    """Until nothing is left to be done: all is in this event loop."""
    for _ in range(30):
        await asyncio.sleep(0)


async def until(happened: Callable[[], Any]) -> None:
    """Until another thread has brought it about."""
    async with asyncio.timeout(180):
        while not happened():
            await asyncio.sleep(0)


def tokens(count: int, first: int = len(PROMPT)) -> list[int]:
    return list(range(first, first + count))


def test_a_job_keeps_the_adapter_under_which_it_began_and_its_version() -> None:
    async def run() -> None:
        stage = Stage()
        for number, label in enumerate(("v1", "v2"), 1):
            stage.adapters.newest = LiveAdapter(label, number, f"adapter-{number}", None)
            await stage.begin(label, max_tokens=4)
            await stage.sample(2)
        await stage.sample(2)
        await stage.ended()
        assert [body["lora_path"] for body in stage.server.bodies] == ["adapter-1", "adapter-2"]
        for label in ("v1", "v2"):
            assert [found for _, found in stage.told(label)] == [label] * 4
        assert stage.adapters.newest is not None
        assert not stage.adapters.newest.jobs

    asyncio.run(run())


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("sample"), st.integers(1, 12), st.booleans()),
        st.tuples(st.just("update"), st.booleans()),
        st.tuples(st.just("begin"), st.integers(1, 90)),
        st.tuples(st.just("abort"), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=30,
)


@given(steps=_STEPS)
def test_every_token_is_told_once_in_order_with_its_version(steps: list[tuple[Any, ...]]) -> None:
    asyncio.run(_walk(steps))


async def _walk(steps: list[tuple[Any, ...]]) -> None:
    stage, aborted, budgets = Stage(), set[str](), dict[str, int]()

    async def begin(budget: int) -> None:
        name = str(len(budgets))
        budgets[name] = budget
        await stage.begin(name, budget)

    await begin(40)
    for verb, *arguments in steps:
        if verb == "begin":
            await begin(*arguments)
        elif verb == "sample":
            await stage.sample(arguments[0], late=arguments[1])
        elif verb == "update":
            await stage.update(recompute=arguments[0])
        elif str(arguments[0]) in budgets:
            aborted.add(str(arguments[0]))
            stage.runs.abort([str(arguments[0])])
            await settled()
    while len(stage.runs):
        await stage.sample(7)
    await stage.ended()
    for number, (name, budget) in enumerate(budgets.items()):
        # A request that is made again samples some tokens again: either may be told.
        truth = {
            (len(request.body["input_ids"]) + at, label)
            for request in stage.server.asked
            if request.body["input_ids"][0] == PROMPT[0] + number
            for at, label in enumerate(request.labels)
        }
        told = stage.told(name)
        assert [token for token, _ in told] == tokens(len(told))
        assert set(told) <= truth
        versions = [int(label[1:]) for _, label in told]
        assert versions == sorted(versions)
        if name not in aborted:
            assert (len(told), stage.finish(name)) == (budget, "length")
        else:
            assert len(told) <= budget
            assert stage.finish(name) in ("aborted", "length")
    assert not stage.server.open


async def test_an_update_makes_a_request_without_a_token_anew_and_keeps_the_others() -> None:
    stage = Stage()
    await stage.begin("old")
    await stage.sample(2)
    await stage.begin("young")
    await stage.update()
    old, young, again = stage.server.bodies
    assert again["input_ids"] == young["input_ids"]
    assert stage.server.aborts == [young["rid"]]
    assert old["extra_key"] == young["extra_key"] != again["extra_key"], "found in no cache of the weights before"
    while len(stage.runs):
        await stage.sample(4)
    await stage.ended()
    assert [label for _, label in stage.told("old")] == ["v0"] * 2 + ["v1"] * 8
    assert [label for _, label in stage.told("young")] == ["v1"] * 10


async def test_the_cache_is_not_shared_across_an_update_to_the_same_label() -> None:
    stage = Stage()
    await stage.begin("before")
    stage.runs.begin_update(recompute=False)
    stage.runs.end_update("v0")
    await settled()
    await stage.begin("behind")
    before, again, behind = [body["extra_key"] for body in stage.server.bodies]
    assert before != again == behind
    await stage.sample(10)
    await stage.ended()


async def test_what_begins_during_an_update_waits_for_its_end() -> None:
    stage = Stage()
    stage.runs.begin_update(recompute=False)
    await stage.begin()
    assert not stage.server.bodies
    stage.runs.cancel_update()
    await settled()
    assert len(stage.server.bodies) == 1
    await stage.sample(10)
    await stage.ended()
    assert {label for _, label in stage.told()} == {"v0"}


async def test_tokens_of_an_uncertain_version_are_revealed_by_a_cut_and_gone_on_from() -> None:
    stage = Stage()
    await stage.begin(max_tokens=100)
    await stage.sample(5)
    await stage.sample(3, late=True)
    await stage.update()
    await stage.sample(REVEAL_TOKENS - 4)
    assert len(stage.told()) == 5, "held back"
    assert len(stage.server.bodies) == 1
    await stage.sample(1)
    first, second = stage.server.bodies
    assert stage.server.aborts == [first["rid"]]
    assert second["input_ids"] == PROMPT + tokens(5 + REVEAL_TOKENS)
    assert second["sampling_params"]["max_new_tokens"] == 100 - 5 - REVEAL_TOKENS
    assert second["extra_key"] == first["extra_key"], "its keys and values are those of its cache"
    assert [label for _, label in stage.told()] == ["v0"] * 8 + ["v1"] * (REVEAL_TOKENS - 3)
    await stage.sample(100)
    await stage.ended()
    assert [token for token, _ in stage.told()] == tokens(100)
    assert stage.finish() == "length"


async def test_under_a_grammar_tokens_are_held_back_to_the_end_for_another_request_would_begin_it_again() -> None:
    stage = Stage(tokenizer=train_tokenizer())
    await stage.begin(max_tokens=100, grammar=GRAMMAR)
    await until(lambda: stage.server.bodies)
    await stage.sample(5)
    await stage.update()
    await stage.sample(2 * REVEAL_TOKENS)
    [body] = stage.server.bodies
    assert body["sampling_params"]["ebnf"] == GRAMMAR
    assert len(stage.told()) == 5
    await stage.sample(100)
    await stage.ended()
    assert stage.server.bodies == [body]
    assert [token for token, _ in stage.told()] == tokens(100)


@pytest.mark.parametrize(
    ("grammars", "tokenizer", "said"),
    [
        (False, object(), "no grammars of llguidance .*--grammar-backend llguidance"),
        (True, object(), "do not know the tokenizer: Only fast tokenizers"),
    ],
    ids=["the server", "llguidance"],
)
async def test_a_grammar_that_would_not_be_followed_is_refused_by_name(
    grammars: bool, tokenizer: Any, said: str
) -> None:
    stage = Stage(tokenizer=tokenizer, grammars=grammars)
    await stage.begin(grammar=GRAMMAR)
    with pytest.raises(PayloadError, match=said):
        await stage.tasks.pop("a")
    assert not stage.server.bodies
    await stage.begin("free")
    await stage.sample(10)
    await stage.ended()
    assert len(stage.told("free")) == 10


async def test_an_abort_takes_what_there_is_and_what_has_not_begun_has_nothing() -> None:
    stage = Stage()
    await stage.begin("begun")
    await stage.sample(3)
    await stage.begin("young")
    stage.runs.abort(["begun", "young", "unknown"])
    stage.runs.abort(["begun"])
    await stage.ended()
    assert [token for token, _ in stage.told("begun")] == tokens(3)
    assert (stage.told("young"), stage.finish("begun"), stage.finish("young")) == ([], "aborted", "aborted")
    assert sorted(stage.server.aborts) == sorted(str(body["rid"]) for body in stage.server.bodies)
    assert not stage.server.open


async def test_a_job_without_a_request_is_aborted_without_asking_the_server() -> None:
    stage = Stage()
    stage.runs.begin_update(recompute=False)
    await stage.begin()
    stage.runs.abort(["a"])
    stage.runs.cancel_update()
    await stage.ended()
    assert stage.finish() == "aborted"
    assert stage.server.aborts == [], "the name of no request is the beginning of every name"


async def test_while_nothing_comes_an_abort_does_not_wait_for_it() -> None:
    stage = Stage()
    await stage.begin()
    await stage.sample(3)
    stage.runs.paused = True
    stage.runs.abort(["a"])
    assert stage.finish() == "aborted"
    await stage.ended()
    assert [token for token, _ in stage.told()] == tokens(3)


async def test_a_job_that_is_left_ends_its_request() -> None:
    stage = Stage()
    await stage.begin()
    await stage.sample(2)
    stage.tasks["a"].cancel()
    await asyncio.gather(*stage.tasks.values(), return_exceptions=True)
    await stage.runs.close()
    assert len(stage.runs) == 0
    assert not stage.server.open
    assert stage.server.aborts == [stage.server.bodies[0]["rid"]]


async def test_an_abort_behind_the_end_of_a_response_leaves_it_whole() -> None:
    stage = Stage(eos=frozenset({len(PROMPT) + 3}))
    await stage.begin()
    await stage.sample(4, late=True)
    stage.runs.abort(["a"])
    await settled()
    assert stage.finish() == "aborted", "nothing had come yet"
    await stage.begin("b")
    await stage.sample(1)
    await stage.sample(3, late=True)
    stage.runs.abort(["b"])
    await stage.ended()
    assert [token for token, _ in stage.told("b")] == tokens(4)
    assert stage.finish("b") == "stop"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda server: server.finish({"error": {"message": "too long"}}), "too long"),
        (lambda server: server.finish({"cut off": True}), "without giving a reason"),
        (lambda server: server.finish(reason={"type": "abort", "message": "evicted"}), "'abort'"),
        (lambda server: server.finish(reason={"type": "abort", "message": "bad", "status_code": 400}), "bad"),
        (lambda server: server.break_off(RefusedError("/generate", 500, "out of memory")), "out of memory"),
        (lambda server: server.break_off(LostError("connection reset")), "connection reset"),
    ],
    ids=["error", "cut off", "abort", "refused amid it", "refused", "lost"],
)
async def test_a_request_that_the_server_ends_fails_its_job_alone(
    end: Callable[[ScriptedServer], None], said: str
) -> None:
    stage = Stage()
    await stage.begin("a")
    await stage.sample(2)
    end(stage.server)
    with pytest.raises(RequestError, match=said):
        await stage.tasks.pop("a")
    assert len(stage.runs) == 0
    await settled()
    assert stage.server.aborts == [stage.server.bodies[0]["rid"]], "it may still run there"
    await stage.begin("b")
    await stage.sample(10)
    await stage.ended()
    assert len(stage.told("b")) == 10


@pytest.mark.parametrize("error", [LostError("connection reset"), EngineError("exit code -9")], ids=["silent", "dead"])
async def test_a_connection_to_a_server_that_is_gone_is_the_engines_failure(error: EngineError) -> None:
    stage = Stage()
    await stage.begin("a")
    stage.server.forget = True
    stage.server.break_off(error)
    with pytest.raises(EngineError, match=r"exit code -9|nobody answers"):
        await stage.tasks.pop("a")


async def test_a_stop_string_ends_a_job_behind_the_token_that_completes_it() -> None:
    tokenizer = train_tokenizer()
    text = tokenizer.decode(tokens(6)[2:5], skip_special_tokens=True)
    stage = Stage(tokenizer=tokenizer)
    await stage.begin(max_tokens=50, stop=(text,))
    await stage.sample(3)
    assert stage.finish() is None
    await stage.sample(9)
    await stage.ended()
    told = [token for token, _ in stage.told()]
    assert (told, stage.finish()) == (tokens(len(told)), "stop")
    assert tokenizer.decode(told, skip_special_tokens=True).endswith(text)
    assert stage.server.aborts == [stage.server.bodies[0]["rid"]]


async def test_preemptions_are_those_that_no_update_asked_for() -> None:
    stage = Stage()
    await stage.begin(max_tokens=4)
    await stage.sample(1)
    await stage.update(recompute=True)
    [request] = stage.server.open.values()
    request.events.put_nowait(
        {
            "output_ids": tokens(3, first=len(PROMPT) + 1),
            "meta_info": {
                "completion_tokens": 4,
                "output_token_logprobs": [[-float(token), token, None] for token in tokens(3, len(PROMPT) + 1)],
                "finish_reason": {"type": "length"},
                "num_retractions": 3,
                "weight_versions": [
                    {"version": "v0", "start": 0, "end": 1},
                    {"version": "v1", "start": 1, "end": 4},
                ],
            },
        }
    )
    await stage.ended()
    assert stage.runs.preemptions == 2
    assert [label for _, label in stage.told()] == ["v0", "v1", "v1", "v1"]

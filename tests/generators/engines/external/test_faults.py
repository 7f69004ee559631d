"""The fate of requests, futures and the backend where something fails, or ends, at a bad moment."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest

from rollmesh.generators.engines.errors import EngineError, RequestError
from rollmesh.generators.engines.external.backend import DecodeJob
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.mesh.errors import PayloadError, WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.engines import tiny
from tests.generators.engines.external.driven_harness import ScriptedHarness
from tests.generators.engines.harness import PROMPT, V1, V2, V3, request

ALL = ["keep", "recompute", "interrupt"]
SHORT = RequestLimits(7, tiny.VOCABULARY, frozenset({tiny.EOS}))


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Iterator[ScriptedHarness]:
    harness = ScriptedHarness(getattr(request, "param", "keep"))
    yield harness
    harness.close()
    assert harness.backend.staged == 0, "staged weights were left behind"
    assert harness.backend.calls.count("stop") == 1, "the backend was not stopped"


def _raises(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def _dies(harness: ScriptedHarness) -> Callable[[], Awaitable[None]]:
    """An operation amid which the engine dies, and which is never answered."""

    def die() -> Awaitable[None]:
        harness.backend.on_death("signal 9")
        return asyncio.get_running_loop().create_future()

    return die


def _check_failed(harness: ScriptedHarness, said: str) -> None:
    """It was told once, and every call says so and what to do."""
    assert said in str(harness.collector.wait_failure())
    assert said in (harness.engine.status().failure or "")
    for call in (
        lambda: harness.engine.submit([request("late")]),
        lambda: harness.engine.update_weights(V3, [], ""),
        lambda: harness.engine.progress({}),
        lambda: harness.engine.probe(PROMPT),
        harness.engine.pause,
        harness.engine.resume,
        harness.engine.sleep,
        harness.engine.wake,
    ):
        with pytest.raises(EngineError, match=re.escape(said)) as caught:
            call()
        assert caught.value.hint
    assert harness.engine.drain(0)
    harness.engine.abort(["anything"])


class _Unstarted(ScriptedHarness):
    """Its backend has a script for its start."""

    def __init__(self, hook: Callable[[ScriptedHarness], Callable[[], object]]) -> None:
        self._hook = hook
        super().__init__()

    def build(self, listener):  # type: ignore[no-untyped-def] # as its base
        self.backend.hooks["start"] = self._hook(self)
        return super().build(listener)


@pytest.mark.parametrize(
    ("hook", "said"),
    [(lambda _: _raises(EngineError("no such port")), "no such port"), (_dies, "signal 9")],
    ids=["raises", "dies"],
)
def test_a_start_that_fails(hook: Callable[[ScriptedHarness], Callable[[], object]], said: str) -> None:
    harness = _Unstarted(hook)
    _check_failed(harness, said)
    harness.close()
    assert harness.backend.calls[-1] == "stop"


def test_a_stop_amid_the_start() -> None:
    """Requests that wait end, in bounded time."""
    starting = threading.Event()

    def hang() -> Awaitable[None]:
        starting.set()
        return asyncio.get_running_loop().create_future()

    harness = _Unstarted(lambda _: hang)
    assert starting.wait(harness.deadline_s)
    harness.engine.submit([request("a")])
    paused = harness.engine.pause()
    harness.close()
    assert harness.collector.wait(["a"])[0].finish_reason == "aborted"
    with pytest.raises(EngineError, match="stopped"):
        paused.result(0)
    assert harness.backend.calls == ["start", "stop"]


def test_an_engine_that_takes_shorter_sequences_is_none() -> None:
    harness = _Unstarted(lambda harness: lambda: setattr(harness.backend, "_limits", SHORT))
    _check_failed(harness, "takes sequences of 7 tokens")
    harness.close()


def test_death_while_decoding(harness: ScriptedHarness) -> None:
    harness.update(V1, harness.constant_weights(10))
    harness.collector.when_streamed({"a": 3}, lambda: harness.backend.on_death("signal 9"))
    harness.engine.submit([request("a", max_tokens=harness.long, stream=True), request("pinned", pinned=True)])
    _check_failed(harness, "signal 9")
    assert not harness.collector.results


def test_an_engine_that_ends_at_a_request_that_started_alone_names_it(harness: ScriptedHarness) -> None:
    """Each of those has its first token before anything else starts."""
    lost = [replace(request(f"lost {token}", [token], max_tokens=harness.long), alone=True) for token in (4, 5, 6)]
    without: list[list[int]] = []

    def look(job: DecodeJob) -> None:
        others = harness.backend._jobs.values()
        without.append([sampling.job.token_ids[0] for sampling in others if not sampling.count])
        if job.token_ids == [6]:
            harness.backend.raised = "RuntimeError: illegal instruction"
            harness.backend.on_death("exit code 1")

    harness.backend.at_job = look
    harness.update(V1, harness.constant_weights(10))
    harness.engine.submit([request("before", [3], max_tokens=harness.long), *lost, request("last", [7])])
    failure = harness.collector.wait_failure()
    assert (failure.culprit, failure.raised) == ("lost 6", "RuntimeError: illegal instruction")
    assert [job.token_ids for job in harness.backend.jobs] == [[3], [4], [5], [6]]
    assert without == [[], [3], [], []]


@pytest.mark.parametrize("operation", ["pause", "load", "resume", "abort"])
@pytest.mark.parametrize("death", [True, False], ids=["dies", "raises"])
@pytest.mark.parametrize("harness", ["interrupt"], indirect=True)
def test_death_amid_a_swap(harness: ScriptedHarness, operation: str, death: bool) -> None:
    """The swap is refused, and so is what comes after it."""
    harness.update(V1, harness.constant_weights(10))
    harness.backend.hooks[operation] = _dies(harness) if death else _raises(EngineError("signal 9"))
    harness.collector.when_streamed(
        {"a": 3}, lambda: swaps.extend(harness.engine.update_weights(v, weights, "") for v in (V2, V3))
    )
    swaps, weights = [], list(harness.constant_weights(11).items())
    harness.engine.submit([request("a", max_tokens=harness.long, stream=True)])
    _check_failed(harness, "signal 9")
    for swap in swaps:
        with pytest.raises(EngineError, match="signal 9"):
            swap.result(harness.deadline_s)
    assert len(swaps) == 2


@pytest.mark.parametrize("operation", ["sleep", "wake", "log_probs"])
def test_death_amid_other_orders(harness: ScriptedHarness, operation: str) -> None:
    harness.update(V1, harness.constant_weights(10))
    harness.backend.hooks[operation] = _dies(harness)
    orders = {
        "sleep": lambda: [harness.engine.sleep()],
        "wake": lambda: [harness.engine.sleep(), harness.engine.wake()],
        "log_probs": lambda: [harness.engine.probe(PROMPT)],
    }[operation]()
    assert isinstance(orders[-1].exception(harness.deadline_s), EngineError)
    _check_failed(harness, "signal 9")


@pytest.mark.parametrize("harness", ALL, indirect=True)
def test_a_load_that_fails_leaves_the_old_weights(harness: ScriptedHarness) -> None:
    harness.update(V1, harness.constant_weights(10))
    harness.backend.hooks["load"] = _raises(WeightsError("no memory"))
    swaps = []
    weights = harness.constant_weights(11).items()
    harness.collector.when_streamed({"a": 5}, lambda: swaps.append(harness.engine.update_weights(V2, weights, "bad")))
    [result] = harness.run([request("a", max_tokens=100, stream=True)])
    with pytest.raises(WeightsError, match="no memory"):
        swaps[0].result(harness.deadline_s)
    assert result.sampled.versions.runs == ((100, V1),)
    assert result.sampled.response_ids.tolist() == [10] * 100
    status = harness.engine.status()
    assert (status.serving, status.digest, status.swaps) == (V1, str(V1), 1)
    del harness.backend.hooks["load"]
    harness.update(V3, harness.constant_weights(12))
    assert harness.run([request("b", max_tokens=2)])[0].sampled.versions.versions == (V3,)


def test_a_stamp_that_no_one_gave_is_a_failure(harness: ScriptedHarness) -> None:
    harness.update(V1, harness.constant_weights(10))
    harness.backend.relabel = lambda _: "default"
    harness.engine.submit([request("a")])
    _check_failed(harness, "'default', which it was not given (last: '1.1')")
    assert not harness.collector.results


@pytest.mark.parametrize(("pinned", "said"), [(False, "went back"), (True, "pinned")])
def test_stamps_that_cannot_be_are_a_failure(harness: ScriptedHarness, pinned: bool, said: str) -> None:
    """Versions never go back within a response, nor change within a pinned one."""
    for version in (V1, V2):
        harness.update(version, harness.constant_weights(10))
    stamps = iter(["1.2", "1.1"] if not pinned else ["1.1", "1.2"])
    harness.backend.relabel = lambda _: next(stamps)
    harness.engine.submit([request("a", max_tokens=9, pinned=pinned)])
    _check_failed(harness, said)


def test_a_job_that_ends_without_a_word_is_a_failure(harness: ScriptedHarness) -> None:
    harness.update(V1, harness.constant_weights(10))
    harness.backend.generate = lambda job, take: asyncio.sleep(0)  # type: ignore[method-assign]
    harness.engine.submit([request("a")])
    _check_failed(harness, "ended without giving a reason")


def test_a_job_that_the_engine_refuses_ends_alone(harness: ScriptedHarness) -> None:
    harness.update(V1, harness.constant_weights(10))
    harness.freeze([request("other", max_tokens=60)])
    harness.backend.hooks["generate"] = _raises(PayloadError("images", "not an image"))
    harness.engine.submit([request("bad")])
    harness.resume()
    bad, other = harness.collector.wait(["bad", "other"])
    assert (bad.finish_reason, len(bad.sampled.response_ids)) == ("aborted", 0)
    assert "not an image" in bad.refusal
    assert (other.finish_reason, len(other.sampled.response_ids), other.refusal) == ("length", 60, "")


@pytest.mark.parametrize("harness", ["keep", "interrupt"], indirect=True)
def test_a_job_at_which_the_engine_fails_is_tried_once_more(harness: ScriptedHarness) -> None:
    """After its tokens, also where all jobs fail while they are interrupted; the second time it is refused."""
    harness.update(V1, harness.constant_weights(10))
    before = harness.freeze([request(name, max_tokens=60) for name in ("a", "b")])
    harness.backend.hooks["load"] = harness.backend.hooks["abort"] = lambda: harness.backend.fail_all(
        RequestError("illegal instruction")
    )
    harness.update(V2, harness.constant_weights(11))
    harness.resume()
    for result in harness.collector.wait(["a", "b"]):
        part = before[result.request_id].sampled
        assert (result.finish_reason, result.refusal) == ("length", "")
        assert result.sampled.response_ids.tolist() == [10] * len(part) + [11] * (60 - len(part))
    harness.freeze([request("c", max_tokens=harness.long)])
    harness.backend.raised = "KeyError: 7"
    for version in (V3, PolicyVersion(3, 3)):
        harness.update(version, harness.constant_weights(11))
        harness.freeze([request(str(version), max_tokens=60)], again=True)
    [refused] = harness.collector.wait(["c"])
    assert (refused.finish_reason, refused.refusal) == (
        "aborted",
        "illegal instruction; the last error in its log: KeyError: 7",
    )
    assert set(refused.sampled.response_ids.tolist()) == {11}
    assert harness.collector.failure is None


def test_a_probe_that_cannot_be_run_fails_alone(harness: ScriptedHarness) -> None:
    harness.update(V1, harness.constant_weights(10))
    harness.backend.hooks["log_probs"] = _raises(EngineError("too long"))
    for _ in range(2):
        with pytest.raises(EngineError, match="too long"):
            harness.engine.probe(PROMPT).result(harness.deadline_s)
        harness.engine.pause().result(harness.deadline_s)
    harness.resume()
    assert len(harness.run([request("a", max_tokens=5)])[0].sampled.response_ids) == 5


@pytest.mark.parametrize("operation", ["pause", "load", "resume", "abort", "sleep", "wake", "log_probs"])
@pytest.mark.parametrize("harness", ["interrupt"], indirect=True)
def test_a_stop_amid_anything(harness: ScriptedHarness, operation: str) -> None:
    """A hung call is left: requests end with their tokens, futures are refused."""
    reached = threading.Event()

    def hang() -> Awaitable[None]:
        reached.set()
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return never

    harness.update(V1, harness.constant_weights(10))
    asked = [request("a", max_tokens=harness.long), request("b", max_tokens=harness.long)]
    before = harness.freeze(asked)
    if operation == "pause":
        harness.resume()
    harness.backend.hooks[operation] = hang
    weights = harness.constant_weights(11).items()
    orders = {
        "pause": lambda: [harness.engine.update_weights(V2, weights, "")],
        "load": lambda: [harness.engine.update_weights(V2, weights, "")],
        "resume": lambda: [harness.engine.resume()],
        "abort": lambda: [harness.engine.update_weights(V2, weights, "")],
        "sleep": lambda: [harness.engine.sleep()],
        "wake": lambda: [harness.engine.sleep(), harness.engine.wake()],
        "log_probs": lambda: [harness.engine.probe(PROMPT)],
    }[operation]()
    for order in orders[:-1]:
        order.result(harness.deadline_s)
    assert reached.wait(harness.deadline_s)
    harness.engine.stop()
    with pytest.raises(EngineError, match="stopped"):
        orders[-1].result(0)
    for result in harness.collector.wait(["a", "b"]):
        # Those that run may have come to their end before the pause.
        assert result.finish_reason == "aborted" or operation == "pause"
        assert len(result.sampled.response_ids) >= len(before[result.request_id].sampled)
    assert harness.collector.failure is None


def test_weights_that_come_just_before_a_failure_are_given_back(harness: ScriptedHarness) -> None:
    asked = []

    def explode(_: object) -> None:
        asked.append(harness.engine.update_weights(V2, harness.constant_weights(11).items(), ""))
        raise RuntimeError("callback went wrong")

    harness.update(V1, harness.constant_weights(10))
    harness.collector.hook = explode
    harness.engine.submit([request("a", max_tokens=2)])
    _check_failed(harness, "callback went wrong")
    with pytest.raises(EngineError, match="callback went wrong"):
        asked[0].result(harness.deadline_s)


def test_a_backend_that_fails_to_end_holds_nothing_up(harness: ScriptedHarness) -> None:
    """Staged weights are released all the same, and the thread ends."""
    harness.update(V1, harness.constant_weights(10))
    harness.freeze([request("pinned", max_tokens=harness.long, pinned=True)])
    swap = harness.engine.update_weights(V2, harness.constant_weights(11).items(), "")
    harness.backend.hooks["stop"] = _raises(RuntimeError("half closed"))
    harness.engine.stop()
    with pytest.raises(EngineError, match="stopped"):
        swap.result(0)
    assert harness.collector.wait(["pinned"])[0].finish_reason == "aborted"


def test_an_engine_that_never_ran_keeps_its_promises() -> None:
    class Idle(ScriptedHarness):
        def build(self, listener):  # type: ignore[no-untyped-def] # as its base
            engine = super().build(listener)
            engine.start = lambda: None  # type: ignore[method-assign]
            return engine

    harness = Idle()
    harness.engine.submit([request("a")])
    probe = harness.engine.probe(PROMPT)
    harness.engine.stop()
    assert harness.collector.wait(["a"])[0].finish_reason == "aborted"
    assert isinstance(probe.exception(0), EngineError)
    assert harness.backend.calls == ["stop"]

"""Rewards that break in a live mesh, from the command line: what each costs, and that it costs no more.

    python -m benchmarks.faults.rewards --steps 60 --json rewards.json

Method: one `rollmesh run` of the demonstration's model and data for each fault, and one without. Read afterwards are
`metrics.jsonl`, `samples.jsonl` and `summary.json`.

* frozen: a function keeps its interpreter for an hour, for one response in twenty.
* killed: a function kills its process, for one response in twenty.
* workers: each second a worker process of the reward service is killed from outside, so that no response is at fault.
* judge: a language model's endpoint answers 429 to every other request.
* hangs: one of two reward services accepts calls and never answers.
* poison: a stranger asks the run's reward service, which keeps scores, for other responses under made-up keys.
* hostile: the model has been trained to answer with numbers that no computer algebra system can compute.

Exits with 1 where a group was lost, a reward is not that of its response, or a ledger does not balance. So it does
where a run did not end. A response that no function can score is no lost group: its member has no reward, by name.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from aiohttp import web

from benchmarks.common import REPOSITORY, HelpFormatter, machine, table, write_json
from benchmarks.faults.spoilt_rewards import share_right
from benchmarks.mesh_run import MeshRun, RunFailedError, run_mesh
from examples.demo.model import build_tokenizer, write_model
from examples.demo.problems import split_problems
from rollmesh.learner.trainers.warm_start import warm_start
from rollmesh.mesh.config.scorers.cache import CacheSection
from rollmesh.mesh.rpc.server import new_server
from rollmesh.protos import reward_pb2, reward_pb2_grpc
from rollmesh.reward_service.cache.cache import ScoreCache
from rollmesh.reward_service.scorers.mathematics import math_value
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.server.server import RewardServer
from tests.faults.world import prepare_data

_FUNCTIONS = REPOSITORY / "benchmarks" / "faults" / "spoilt_rewards.py"
_WARM_UP = 5
_HOSTILE = ("\\boxed{9^{9^{9^{9}}}}", "\\boxed{(10^{7})!}", "\\boxed{7^{7^{10}}}")
_RUN_S = 900.0


@dataclass(frozen=True, slots=True)
class Found:
    """The findings of one fault.

    Attributes:
        fault: its name.
        steps: batches trained.
        step_s, longest_s: median and longest time from one step to the next, after the warm-up.
        members, unscored: of the trained groups; those without a reward by code.
        failed_groups: groups that were given up.
        wrong: what must not be.
    """

    fault: str
    steps: int
    step_s: float
    longest_s: float
    members: int
    unscored: dict[str, int]
    failed_groups: int
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, put to a run.

    Attributes:
        reward: the section of the configuration.
        world: surroundings of the run.
        truth: the reward of a response to a ground truth; None where it cannot be known here.
        codes: errors that a member may end with.
    """

    reward: Mapping[str, Any]
    world: AbstractContextManager[Any] = field(default_factory=nullcontext)
    truth: Callable[[str, str], float] | None = share_right
    codes: frozenset[str] = frozenset()
    model: str = "model"
    rollout: Mapping[str, Any] = field(default_factory=dict)


def faults(folder: Path) -> dict[str, Callable[[], Fault]]:
    """By name; each is made when its turn comes."""
    run = folder / "runs"

    def functions(name: str, **more: Any) -> dict[str, Any]:
        return {"functions": [f"{_FUNCTIONS}:{name}"], "timeout_s": 6.0, "scorer_timeout_s": 2.0, **more}

    def judged() -> Fault:
        endpoint = _Judge()
        judge = {"base_url": endpoint.url, "model": "judge", "timeout_s": 3.0}
        reward = {"functions": ["judge"], "judge": judge, "timeout_s": 12.0, "scorer_timeout_s": 8.0}
        return Fault(reward, endpoint.serving(), lambda response, _truth: len(response.strip()) % 11 / 10)

    def hanging() -> Fault:
        servers = _Servers([f"{_FUNCTIONS}:right"], hanging=1)
        return Fault({"endpoints": servers.addresses, "timeout_s": 3.0, "scorer_timeout_s": 2.0}, servers.serving())

    def poisoned() -> Fault:
        servers = _Servers(["math"], poisoned=True)
        reward = {"endpoints": servers.addresses, "timeout_s": 6.0, "scorer_timeout_s": 2.0}
        return Fault(reward, servers.serving(), _graded)

    def hostile() -> Fault:
        rollout = {"max_response_tokens": 32}
        # Each such answer costs its time limit.
        reward = {"functions": ["math"], "timeout_s": 3.0, "scorer_timeout_s": 0.5}
        return Fault(reward, nullcontext(), None, frozenset({"reward_timeout", "reward_crashed"}), "hostile", rollout)

    return {
        "none": lambda: Fault(functions("right")),
        "frozen": lambda: Fault(functions("freezes"), codes=frozenset({"reward_timeout"})),
        "killed": lambda: Fault(functions("dies"), codes=frozenset({"reward_crashed", "reward_timeout"})),
        "workers": lambda: Fault(functions("right"), _killed_workers(run)),
        "judge": judged,
        "hangs": hanging,
        "poison": poisoned,
        "hostile": hostile,
    }


def document(name: str, fault: Fault, folder: Path, steps: int) -> dict[str, Any]:
    """The configuration of a run."""
    return {
        "run": {"name": name, "dir": str(folder / "runs")},
        "model": {"path": str(folder / "data" / fault.model)},
        "data": {"train": str(folder / "data" / "train.parquet")},
        "algorithm": {"name": "grpo"},
        "rollout": {"device": "cpu", "n": 4, "slots": 32, "max_prompt_tokens": 16, "max_response_tokens": 6}
        | dict(fault.rollout),
        "reward": dict(fault.reward),
        "learner": {"device": "cpu", "steps": steps, "batch": {"groups": 8}, "optimizer": {"lr": 1e-5}},
        "logging": {"samples_per_step": 32, "console_every_steps": 20},
        "network": {"metrics": False},
    }


def prepare(folder: Path) -> None:
    """The data, a model with a short warm start, and one that answers with what nothing can compute."""
    prepare_data(folder)
    if (folder / "hostile").exists():
        return
    tokenizer = build_tokenizer("0123456789+=\\boxed{^}()!")
    problems, _ = split_problems("arithmetic", largest_digit=4, held_out=16, seed=0)
    end = [tokenizer.eos_token_id]
    dice = random.Random(0)
    pairs = []
    for problem in problems:
        # Half of the answers can be scored.
        answer = problem.answer if dice.random() < 0.5 else dice.choice(_HOSTILE)
        pairs.append((tokenizer.encode(problem.prompt), tokenizer.encode(answer) + end))
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), 0, tokenizer)
        warm_start(scratch, pairs, steps=80, lr=1e-3, batch=32, out_folder=folder / "hostile")


def put(name: str, fault: Fault, folder: Path, steps: int) -> Found:
    """Runs a fault."""
    with fault.world:
        try:
            run = run_mesh(document(name, fault, folder, steps), timeout_s=_RUN_S)
        except RunFailedError as error:
            return Found(name, 0, 0.0, 0.0, 0, {}, 0, [str(error)])
    return judge_run(name, fault, run, steps)


def judge_run(name: str, fault: Fault, run: MeshRun, steps: int) -> Found:
    """The findings of a finished run."""
    gaps = _gaps(run.steps[_WARM_UP:])
    unscored: Counter[str] = Counter()
    for step in run.steps:
        unscored.update(
            {key.removeprefix("unscored/"): int(n) for key, n in step.items() if key.startswith("unscored/")}
        )
    ledgers = run.summary["ledger"]
    failed = sum(
        count for ledger in ledgers.values() for why, count in ledger.get("reasons", {}).items() if "fail" in why
    )
    wrong = [line for ledger in ledgers.values() for line in ledger["discrepancies"]]
    if not ledgers:
        wrong.append("the buffer did not say its ledger at the end")
    if len(run.steps) < steps:
        wrong.append(f"{len(run.steps)} of {steps} steps")
    if unknown := set(unscored) - fault.codes:
        wrong.append(f"members without a reward for another reason: {', '.join(sorted(unknown))}")
    if failed and not fault.codes:
        wrong.append(f"{failed} groups were given up")
    wrong += _false_rewards(fault, run.folder / "samples.jsonl")
    return Found(
        name,
        len(run.steps),
        gaps[len(gaps) // 2] if gaps else 0.0,
        gaps[-1] if gaps else 0.0,
        32 * len(run.steps),
        dict(unscored),
        failed,
        wrong,
    )


def _gaps(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    return sorted(later["wall_s"] - former["wall_s"] for former, later in itertools.pairwise(steps))


def _false_rewards(fault: Fault, samples: Path) -> list[str]:
    """Rewards that are not those of their responses, from the kept samples."""
    if fault.truth is None:
        return []
    wrong = []
    for text in samples.read_text(encoding="utf-8").splitlines():
        sample = json.loads(text)
        if sample.get("reward") is None:
            continue
        left, _, right = sample["prompt"].rstrip("=").partition("+")
        should = fault.truth(sample["response"], f"{int(left) + int(right):02d}")
        if abs(sample["reward"] - should) > 1e-6:
            wrong.append(f"{sample['prompt']}{sample['response']!r}: {sample['reward']}, not {should}")
    return wrong[:5]


def _graded(response: str, truth: str) -> float:
    """The score by the scorer itself, without a cache: `20C` is 20 to it."""
    graded = math_value.grade(response, truth)
    return float(graded is not None and graded.correct)


# ------------------------------------------------------------------------------------------------ the world around


@contextmanager
def _in_a_loop(start: Callable[[asyncio.Event], Any]) -> Iterator[None]:
    """Runs a coroutine function in a thread of its own until the end of the block."""
    loop = asyncio.new_event_loop()
    over = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(start(over)), daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)


class _Judge:
    """An endpoint of the OpenAI form. Every other request is one too many; the others get a score by length."""

    def __init__(self) -> None:
        self._asked = 0
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def serving(self) -> AbstractContextManager[None]:
        return _in_a_loop(self._serve)

    async def _serve(self, over: asyncio.Event) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        await over.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._asked += 1
        if self._asked % 2:
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers={"Retry-After": "0.1"})
        shown = (
            str(body["messages"][1]["content"])
            .partition("<response ")[2]
            .partition(">\n")[2]
            .partition("\n</response")[0]
        )
        text = json.dumps({"reason": "its length", "score": len(shown.strip()) % 11})
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10}})


class _Hanging(reward_pb2_grpc.RewardServicer):
    """Says what it is, and never scores."""

    async def Info(self, request: Any, context: Any) -> reward_pb2.InfoResponse:  # noqa: ARG002 - the contract's signature
        return reward_pb2.InfoResponse(name="hangs")

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:  # noqa: ARG002 - the contract's signature
        await asyncio.sleep(_RUN_S)
        return reward_pb2.ScoreResponse()


class _Servers:
    """Reward services that the run is told of by their addresses.

    Args:
        functions: of the one that scores.
        hanging: number of others, which never answer.
        poisoned: a stranger asks it for other responses all the time.
    """

    def __init__(self, functions: Sequence[str], *, hanging: int = 0, poisoned: bool = False) -> None:
        self._functions = functions
        self._ports = [_free_port() for _ in range(1 + hanging)]
        self._poisoned = poisoned
        self.addresses = [f"grpc://127.0.0.1:{port}" for port in self._ports]

    def serving(self) -> AbstractContextManager[None]:
        return _in_a_loop(self._serve)

    async def _serve(self, over: asyncio.Event) -> None:
        cache = ScoreCache(CacheSection()) if self._poisoned else None
        engine = ScoringEngine(self._functions, workers=2, call_timeout_s=2.0, cache=cache)
        scoring = RewardServer(engine, timeout_s=6.0)
        await scoring.start(port=self._ports[0])
        others = []
        for port in self._ports[1:]:
            server = new_server(_no_security())
            reward_pb2_grpc.add_RewardServicer_to_server(_Hanging(), server)
            server.add_insecure_port(f"127.0.0.1:{port}")
            await server.start()
            others.append(server)
        stranger = asyncio.create_task(self._poison()) if self._poisoned else None
        await over.wait()
        if stranger is not None:
            stranger.cancel()
            with suppress(asyncio.CancelledError):
                await stranger
        for server in others:
            await server.stop(0)
        await scoring.stop()

    async def _poison(self) -> None:
        """Asks for the right answers' scores under the keys and ids of wrong ones, and the other way round."""
        dice = random.Random(0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._ports[0]}") as channel:
            stub = reward_pb2_grpc.RewardStub(channel)
            while True:
                left, right = dice.randrange(45), dice.randrange(45)
                truth = f"{left + right:02d}"
                items = [
                    reward_pb2.ScoreItem(
                        item_id=f"poison/{number}",
                        group_id="poison",
                        data_source="demo/arithmetic",
                        prompt=f"{left:02d}+{right:02d}=",
                        response=response,
                        ground_truth_json=json.dumps(response if dice.random() < 0.5 else truth),
                        content_key=key,
                    )
                    for number, (response, key) in enumerate([("99", b"\0" * 32), (truth, b"\1" * 32), ("07", b"")])
                ]
                with suppress(grpc.aio.AioRpcError):
                    await stub.Score(reward_pb2.ScoreRequest(items=items), timeout=5)
                await asyncio.sleep(0.02)


def _no_security() -> Any:
    from rollmesh.mesh.config.network import SecuritySection

    return SecuritySection()


@contextmanager
def _killed_workers(runs: Path) -> Iterator[None]:
    """Kills a worker process of the reward service each second.

    Raises:
        RuntimeError: there was none to kill.
    """
    over, killed = threading.Event(), list[None]()

    def kill() -> None:
        dice = random.Random(0)
        while not over.wait(1.0):
            with suppress(OSError, ValueError, psutil.Error):
                note = runs / "workers" / "services" / "reward.json"
                service = psutil.Process(int(json.loads(note.read_text(encoding="utf-8"))["pid"]))
                if workers := service.children():
                    dice.choice(workers).kill()
                    killed.append(None)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if not killed:
        raise RuntimeError("no worker was killed: the run is too short")


def _free_port() -> int:
    from tests.faults.world import free_port

    return free_port()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--faults", nargs="+", help="only these; all, if left out")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--folder", type=Path, help="work here, and keep it")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="reward-faults-"))
    prepare(folder / "data")
    found = []
    for name, make in faults(folder).items():
        if options.faults and name not in options.faults:
            continue
        began = time.monotonic()
        found.append(put(name, make(), folder, options.steps))
        print(f"{name}: {time.monotonic() - began:.0f} s {found[-1].wrong or 'sound'}", flush=True)
    rows = [
        (
            each.fault,
            each.steps,
            f"{each.step_s:.2f}",
            f"{each.longest_s:.2f}",
            each.members,
            ", ".join(f"{code} {count}" for code, count in each.unscored.items()) or "0",
            each.failed_groups,
            len(each.wrong),
        )
        for each in found
    ]
    header = ("fault", "steps", "s/step", "longest s", "responses", "without a reward", "groups given up", "wrong")
    print(table(header, rows))
    for each in found:
        for line in each.wrong:
            print(f"WRONG: {each.fault}: {line}")
    if options.json:
        write_json(
            options.json, {"machine": machine(), "steps": options.steps, "faults": [asdict(each) for each in found]}
        )
    sound = not any(each.wrong for each in found)
    if sound and options.folder is None:
        shutil.rmtree(folder)
    else:
        print(f"kept: {folder}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())

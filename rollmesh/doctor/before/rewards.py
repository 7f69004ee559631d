"""The reward of a run, tried on a row of its own data, and the endpoints that it names."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import grpc

from rollmesh.doctor.findings import Finding, not_checked, ok, problem, warning
from rollmesh.learner.data.dataset import open_source
from rollmesh.learner.data.locations import is_hub_id
from rollmesh.learner.data.parts.messages import text_of
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers.parts import uses
from rollmesh.mesh.runtime.threads import reward_workers
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.endpoint import connector
from rollmesh.reward_service.client.transports.interface import CallError
from rollmesh.reward_service.routing import split_routes
from rollmesh.reward_service.samples import item
from rollmesh.reward_service.sandbox.configured import in_force
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError
from rollmesh.reward_service.scoring.configured import configured_engine

CHECK = "rewards"
# Beyond the limit of one call: the first worker loads the function.
_LOADING_S = 30.0
_CONNECT_S = 5.0
# Other statuses come from a server that is there.
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
# Share of a scorer's limit from which a busy machine would end it.
_SLOW_SHARE = 0.5
_WRONG = "certainly not this"


@dataclass(frozen=True, slots=True)
class Answer:
    """The reward's answer about one response.

    Attributes:
        outcome: `scored`, `unscorable` or `error`.
        total: of a scored one.
        text: the reason, or code and message of the error.
    """

    outcome: str
    total: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Tried:
    """The reward of two responses to one row: its ground truth, and a wrong one.

    Attributes:
        origin: of the row.
        data_source: of the row.
        right, wrong: the answers.
        seconds: that both took, the loading of functions left out.
        limit_s: `reward.scorer_timeout_s`.
    """

    origin: str
    data_source: str
    right: Answer
    wrong: Answer
    seconds: float
    limit_s: float


def check_rewards(config: Config) -> Iterator[Finding]:
    """Scores two responses to the first row of each training source as a reward service would."""
    if config.reward.endpoints:
        return
    if config.reward.python is not None:
        yield not_checked(CHECK, "functions run in reward.python; `rollmesh reward check` asks a service that runs")
        return
    rows = [first_row(config, index) for index, source in enumerate(config.data.train) if not is_hub_id(source.path)]
    if not rows:
        yield not_checked(CHECK, "all rows are on the hub")
        return
    for tried in asyncio.run(try_rewards(config, rows)):
        yield from judge(tried, config.reward)


def first_row(config: Config, source: int) -> Row:
    """The first row of a training source.

    Raises:
        DataError: it cannot be read.
    """
    return open_source(config.data.train[source], config.data.prompt_key, checked=False).rows([0])[0]


async def try_rewards(config: Config, rows: Sequence[Row]) -> list[Tried]:
    """Scores the ground truth of each row, and a wrong response.

    Raises:
        RewardError: a function cannot be loaded.
    """
    reward = config.reward
    remote = split_routes(reward.by_data_source)[1]
    engine = configured_engine(reward, workers=1, keeps=False)
    found = []
    try:
        await engine.start()
        for number, row in enumerate(rows):
            if row.data_source in remote:
                continue
            items = [_item(row, f"{number}/{what}", text) for what, text in enumerate((_truth(row), _WRONG))]
            began = time.monotonic()
            results = await engine.score(items, 2 * reward.scorer_timeout_s + _LOADING_S)
            seconds = time.monotonic() - began
            right, wrong = map(_answer, results)
            found.append(Tried(row.origin, row.data_source, right, wrong, seconds, reward.scorer_timeout_s))
    finally:
        await engine.close()
    return found


def judge(tried: Tried, reward: RewardSection) -> Iterator[Finding]:
    """Judges the answers.

    Args:
        tried: the answers about one row.
        reward: of the run.
    """
    functions = ", ".join(uses(reward.by_data_source.get(tried.data_source, reward.functions)))
    source = f"data_source {tried.data_source!r}" if tried.data_source else "a row without data_source"
    failed = next((answer for answer in (tried.right, tried.wrong) if answer.outcome == "error"), None)
    numbers = {"seconds": tried.seconds, "right": tried.right.total, "wrong": tried.wrong.total}
    if failed is not None and failed.text.startswith("timeout"):
        yield problem(
            CHECK,
            f"{functions} gave no answer about {tried.origin} within {tried.limit_s:g} s",
            f"reward.scorer_timeout_s={4 * tried.limit_s:g} with reward.timeout_s={8 * tried.limit_s:g} and "
            f"rollout.reward_wait_s={10 * tried.limit_s:g}, or a quicker function",
            **numbers,
        )
    elif failed is not None:
        yield problem(
            CHECK,
            f"{functions} fails for {tried.origin} ({source}): {failed.text}",
            "repair the function, or name another one in reward.functions or reward.by_data_source",
            **numbers,
        )
    elif tried.right.outcome == tried.wrong.outcome == "unscorable":
        yield problem(
            CHECK,
            f"{functions} scores neither of two responses to {tried.origin} ({source}): {tried.right.text}",
            "name a function that knows this data_source in reward.by_data_source",
            **numbers,
        )
    elif tried.seconds > _SLOW_SHARE * tried.limit_s:
        yield warning(
            CHECK,
            f"two responses took {tried.seconds:.1f} s, and one may take {tried.limit_s:g} s",
            f"reward.scorer_timeout_s={2 * tried.seconds:.0f} or more, and reward.workers for as many as are to be "
            "scored at once",
            **numbers,
        )
    elif tried.right == tried.wrong:
        yield warning(
            CHECK,
            f"the ground truth of {tried.origin} and a wrong response both get {tried.right.total:g}",
            "is that meant? A reward that reads no ground truth may; else check the field that the function reads",
            **numbers,
        )
    else:
        yield ok(
            CHECK,
            f"{source}: the ground truth gets {tried.right.total:g}, a wrong response {tried.wrong.total:g}, "
            f"in {1000 * tried.seconds:.0f} ms; up to {max(reward_workers(reward.workers))} processes score at once",
            **numbers,
        )


def check_endpoints(config: Config) -> Iterator[Finding]:
    """Reward servers that are not started here: each is reached."""
    for address, error in asyncio.run(reach_all(config)).items():
        if error:
            yield problem(
                CHECK,
                f"the reward server {address} is not reached: {error}",
                f"start it, correct reward.endpoints, or open its port; `rollmesh reward check {address}` tells more",
            )
        else:
            yield ok(CHECK, f"the reward server {address} answers")


def check_isolation(config: Config) -> Iterator[Finding]:
    """The rung on which programs of models will run, where a scorer runs some."""
    if config.reward.endpoints or not config.reward.runs_programs:
        return
    try:
        executor = asyncio.run(in_force(config.reward.isolation))
    except UnavailableError as error:
        yield problem(CHECK, error.message, error.hint or "docs/isolation.md says what each rung needs")
        return
    what = f"programs of the model run on {executor.describe()}"
    if executor.missing:
        yield warning(CHECK, what, "docs/isolation.md says what each rung needs", rung=executor.rung)
    else:
        yield ok(CHECK, what, rung=executor.rung)


async def reach_all(config: Config) -> dict[str, str]:
    """The reason why each server that a configuration names is not reached, by address; empty where it is."""
    reward = config.reward
    connect = connector(config.security, reward.key_files, reward.tls)
    routed = split_routes(reward.by_data_source)[1].values()

    async def reach(address: str) -> str:
        transport = connect(address)
        try:
            await transport.info(_CONNECT_S)
        except CallError as error:
            return str(error) if error.status in _AWAY else ""
        finally:
            await transport.close()
        return ""

    addresses = list(dict.fromkeys((*reward.endpoints, *chain.from_iterable(routed))))
    return dict(zip(addresses, await asyncio.gather(*map(reach, addresses)), strict=True))


def _item(row: Row, item_id: str, response: str) -> reward_pb2.ScoreItem:
    prompt = row.prompt if isinstance(row.prompt, str) else "\n".join(map(text_of, row.prompt))
    return item(
        item_id,
        response,
        json.dumps(row.ground_truth, default=str),
        group_id=item_id.partition("/")[0],
        data_source=row.data_source,
        prompt=prompt,
        extra_info_json=json.dumps(dict(row.extra_info), default=str),
    )


def _truth(row: Row) -> str:
    return row.ground_truth if isinstance(row.ground_truth, str) else json.dumps(row.ground_truth, default=str)


def _answer(result: reward_pb2.ScoreResult) -> Answer:
    outcome = result.WhichOneof("outcome") or "error"
    if outcome == "scored":
        return Answer(outcome, result.scored.total)
    if outcome == "unscorable":
        return Answer(outcome, text=result.unscorable.reason)
    return Answer("error", text=f"{result.error.code}: {result.error.message}")

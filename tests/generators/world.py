"""A mesh for tests: the real buffer on a real Redis, a learner made of the real publisher and client, generators."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import string
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import redis.asyncio
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from rollmesh.buffer.client.client import BufferClient, SampleStream, SampleUpdate
from rollmesh.buffer.server.process import BufferFront
from rollmesh.generators.service import GeneratorOptions, serve
from rollmesh.learner.weights import PublishRules, WeightPublisher, WeightsService, read_model_bundle
from rollmesh.mesh.access.code_permissions import AllowCode, CodeRule
from rollmesh.mesh.access.roles import Identity, Role, new_identity
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import LostStateError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.retries import call_with_retry
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime import memory_tuning
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.runtime.service import Shutdown
from rollmesh.mesh.trajectory.payload_codec import Trajectory, decode
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import (
    buffer_pb2,
    generator_pb2,
    generator_pb2_grpc,
    membership_pb2,
    trajectory_pb2,
    weights_pb2_grpc,
)
from tests.generators.forked import ForkedProgram, fork

SECURITY = SecuritySection()
ANY_CODE = CodeRule(AllowCode.ANY)
DEADLINE_S = 240.0


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    names = ["<pad>", "<end>", "<unk>", *string.digits, *"+-="]
    core = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


TOKENIZER = build_tokenizer()


# Not in the vocabulary: a model with this end token never ends by itself.
_NEVER = 10_000


@functools.cache
def _model(*, endless: bool, head_dim: int) -> tuple[Mapping[str, bytes], PreTrainedModel]:
    """A tiny random Qwen3 model and its files; an `endless` one never ends a response by itself."""
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=_NEVER if endless else 1,
        bos_token_id=None,
    )
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
        # Read before generators load theirs in this process: transformers ties no weights anywhere meanwhile.
        model = AutoModelForCausalLM.from_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}, model


def settings(folder: Path, **overrides: Any) -> Config:
    """A small configuration; `overrides` are dotted keys with __ for the dots."""
    values = {
        "run": {"name": "test", "dir": str(folder / "runs")},
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "none.parquet")},
        "rollout": {"device": "cpu", "n": 4, "slots": 16, "max_response_tokens": 12, "max_prompt_tokens": 16},
        "reward": {"in_process": True},
        "learner": {"batch": {"groups": 4}, "device": "cpu"},
        "buffer": {"lease_s": 6.0, "reconnect_grace_s": 0.5, "max_staleness": 4},
        "network": {"metrics": False, "retry_s": 10.0, "rpc_timeout_s": 5.0},
        "resources": {"generator_threads": 1},
        "logging": {"level": "warning"},
    }
    return load_config(values, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in overrides.items()])


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Asks again and again, for things that other processes do."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.02)


def perturbed(model: PreTrainedModel, version: int) -> PreTrainedModel:
    """Changes the weights in place so that each version has its own distribution."""
    generator = torch.Generator().manual_seed(1000 + version)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


class Learner:
    """Publishes real weights, seeds tasks, samples and commits; trains nothing."""

    def __init__(self, world: World, member_id: str) -> None:
        self.world = world
        self.member_id = member_id
        self.incarnation = 0
        self.ordinal = 0
        self.uses: list[buffer_pb2.AssertedUse] = []
        self.version = 0
        self.publisher: WeightPublisher
        self.client: BufferClient
        self.agent: MembershipAgent
        self.server: Any
        self._stream: SampleStream | None = None
        self.payloads: dict[str, list[bytes]] = {}
        """By group: those of its members that came with the lease."""
        self._stack = AsyncExitStack()

    async def start(self, version: int = 0, *, takeover: bool = False) -> None:
        config = self.world.config
        bundle = read_model_bundle(self.world.model_folder)
        self.publisher = WeightPublisher(
            config.run.name,
            bundle,
            PublishRules.of(config),
        )
        self._stack.callback(self.publisher.close)
        self.server = new_server(SECURITY)
        service = WeightsService(self.publisher, config.weights.fanout)
        weights_pb2_grpc.add_WeightsServicer_to_server(service, self.server)
        port = bind(self.server, "127.0.0.1", 0, SECURITY)
        await self.server.start()
        channel = open_channel(self.world.address, SECURITY)
        self.client = BufferClient(channel, timeout_s=5, retry_s=20)
        self.agent = MembershipAgent(
            channel,
            membership_pb2.ROLE_LEARNER,
            member_id=self.member_id,
            address=f"127.0.0.1:{port}",
            host_id=host_id(),
        )
        await self.agent.start()
        self._stack.push_async_callback(self.agent.stop)
        response = await self.client.resume("train", self.member_id, version, takeover=takeover)
        self.incarnation, self.version = response.incarnation, version
        self.client.on_lost_state = lambda: self._say_again(version)
        self.ordinal = response.seeded
        self.agent.set_status(incarnation=self.incarnation)

        # A mesh that waits for seconds only may wait for less than a busy machine takes.
        await call_with_retry(self.agent.heartbeat, retry_s=DEADLINE_S, what="a heartbeat")

    async def _say_again(self, resumed_at: int) -> None:
        """Redis may have lost acknowledged writes: tells it what has been used."""
        takeover = buffer_pb2.Takeover(incarnation=self.incarnation, resumed_at=resumed_at)

        async def understood() -> bool:
            with contextlib.suppress(LostStateError):
                await self.client.reassert(self.incarnation, self.member_id, self.version, 0, "", [takeover], self.uses)
                return True
            return False

        await eventually(understood)

    async def publish(self, version: int, *, before_announcing: Any = None) -> None:
        """Weights of `version` (a function of the version alone), then the announcement."""
        model = self.world.model(version)
        self.publisher.publish(PolicyVersion(self.incarnation, version), model.named_parameters(), "float32")
        if before_announcing is not None:
            await before_announcing()
        await self.client.set_policy_version(self.incarnation, version)
        self.version = version

    def tasks(self, count: int, *, greedy: int = 0, **sampling: Any) -> list[trajectory_pb2.PromptTask]:
        """Additions; ordinals continue. `greedy` members come on top of those sampled."""
        found = []
        for _ in range(count):
            self.ordinal += 1
            left, right = self.ordinal % 50, self.ordinal * 7 % 50
            prompt = f"{left:02d}+{right:02d}="
            found.append(
                trajectory_pb2.PromptTask(
                    task_id=f"t{self.ordinal}",
                    ordinal=self.ordinal,
                    prompt_ids=np.array(TOKENIZER.encode(prompt), "<i4").tobytes(),
                    prompt_text=prompt,
                    data_source="demo/arithmetic",
                    ground_truth_json=json.dumps(f"{left + right:02d}"),
                    n=self.world.config.rollout.n + greedy,
                    greedy=greedy,
                    sampling=trajectory_pb2.SamplingParams(
                        **{"temperature": 1.0, "max_tokens": self.world.config.rollout.max_response_tokens, **sampling}
                    ),
                )
            )
        return found

    async def seed(self, count: int, *, greedy: int = 0, **sampling: Any) -> None:
        await self.client.seed("train", self.incarnation, self.tasks(count, greedy=greedy, **sampling))

    async def sample(self, groups: int, version: int) -> list[buffer_pb2.LeasedGroup]:
        """Leases `groups` groups to train at `version`."""
        if self._stream is None:
            self._stream = self.client.sample("train", self.incarnation)
            self._stack.push_async_callback(self._stream.close)
        self._stream.request(groups, version)
        got: list[buffer_pb2.LeasedGroup] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(got) < groups:
                response = await self._stream.next(DEADLINE_S)
                assert response is not None, self._stream.waiting_reason
                got += self.taken(response)
        return got

    def taken(self, response: SampleUpdate) -> list[buffer_pb2.LeasedGroup]:
        """The groups of a response; their payloads are kept in `payloads`."""
        for arrived in response.groups:
            self.payloads[arrived.leased.group_id] = [bytes(payload) for payload in arrived.payloads]
        return [arrived.leased for arrived in response.groups]

    async def train(self, version: int, groups: int | None = None) -> list[buffer_pb2.LeasedGroup]:
        """Samples and claims a batch at `version`, then publishes the next version."""
        batch = await self.sample(groups or self.world.config.learner.batch.groups, version)
        leases = [buffer_pb2.LeaseRef(group_id=g.group_id, lease_id=g.lease_id) for g in batch]
        claimed = await self.client.claim("train", self.incarnation, version, leases)
        assert claimed.claimed, claimed.refused
        self.uses += [
            buffer_pb2.AssertedUse(group_id=g.group_id, train_version=version, ordinal=g.task.ordinal) for g in batch
        ]
        await self.publish(version + 1)
        return batch

    async def swapped(self, count: int) -> None:
        """Waits until generators have reported `count` swaps in all."""

        async def reported() -> bool:
            return self.publisher.pushes.summary().count >= count

        await eventually(reported)

    async def stop(self) -> None:
        """Gone without a word."""
        await self._stack.aclose()
        await self.server.stop(0)


class World:
    """One test's mesh."""

    def __init__(self, folder: Path, config: Config, *, endless: bool, head_dim: int = 16) -> None:
        self.folder = folder
        self.config = config
        self.model_folder = folder / "model"
        self.model_folder.mkdir()
        files, self._model = _model(endless=endless, head_dim=head_dim)
        for name, content in files.items():
            (self.model_folder / name).write_bytes(content)
        # A test may have given it a template of its own.
        tokenizer = copy.deepcopy(TOKENIZER)
        if endless:
            tokenizer.eos_token = None
        tokenizer.save_pretrained(self.model_folder)
        self.buffer: BufferFront
        self.address = ""
        self.stack = AsyncExitStack()
        self._processes: dict[str, ForkedProgram] = {}

    def model(self, version: int) -> PreTrainedModel:
        """The model whose weights are published as `version`."""
        return perturbed(copy.deepcopy(self._model), version).eval()

    async def learner(self, name: str = "learner-1", version: int = 0, *, takeover: bool = False) -> Learner:
        learner = Learner(self, name)
        await learner.start(version, takeover=takeover)
        self.stack.push_async_callback(learner.stop)
        return learner

    def generator(
        self, member_id: str | None = None, *, code: CodeRule = ANY_CODE, shares_devices: bool | None = None
    ) -> tuple[asyncio.Task[int], Shutdown]:
        """A generator inside this process."""
        if self.config.rollout.engine == "hf":
            self._ease_generators()
        shutdown = Shutdown()
        task = asyncio.create_task(
            serve(
                self.address,
                shutdown,
                GeneratorOptions(
                    identity=Identity(Role.GENERATOR, member_id) if member_id else new_identity(Role.GENERATOR),
                    security=SECURITY,
                    code=code,
                    threads=1,
                    shares_devices=shares_devices,
                ),
            )
        )

        async def end() -> None:
            shutdown.request("the test is over")
            await asyncio.gather(task, return_exceptions=True)

        self.stack.push_async_callback(end)
        return task, shutdown

    def _ease_generators(self) -> None:
        """Engines call the model directly: to record its forward pass takes longer than all tokens of a test.
        Generators look for no open files: this process has far more objects than theirs, and flushes its files itself.
        """
        from rollmesh.generators.engines.hf import decoder
        from rollmesh.generators.engines.hf.model.traced_forward import DirectForward

        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(decoder, "record", lambda loaded, *_: DirectForward(loaded.model))
        patch.setattr(memory_tuning, "note_files", lambda: None)

    async def process(
        self, member_id: str, first: str = "", *, bound: int | None = None, options: Sequence[str] = ()
    ) -> ForkedProgram:
        """A generator as a process of its own, in an empty directory, with nothing but the mesh address.

        Args:
            member_id: its name in the mesh.
            first: a statement that it executes before.
            bound: of its responses at first; `set_pace` changes it.
            options: more of its command line.
        """
        empty, temporary = self.folder / member_id, self.folder / "tmp"
        empty.mkdir()
        temporary.mkdir(exist_ok=True)
        if bound is not None:
            self.set_pace(member_id, bound)
        pace = str(self._pace(member_id)) if bound is not None else ""
        process = await asyncio.to_thread(
            fork, "tests.generators.generator_process",
            json.dumps({"folder": str(empty), "temporary": str(temporary), "pace": pace, "first": first}),
            "generator", "--mesh", self.address, "--member-id", member_id, "--threads", "1",
            "--ready-file", str(self.folder / f"{member_id}.ready"), *options,
            log=self.folder / f"{member_id}.log",
        )  # fmt: skip
        self.stack.push_async_callback(process.end)
        self._processes[member_id] = process
        return process

    def _pace(self, member_id: str) -> Path:
        return self.folder / f"{member_id}.pace"

    def set_pace(self, member_id: str, bound: int | None) -> None:
        """Sets the response tokens at which a process that has a bound stands still."""
        written = self.folder / f"{member_id}.new"
        written.write_text("" if bound is None else str(bound))
        written.replace(self._pace(member_id))

    async def control(self, member_id: str) -> generator_pb2_grpc.GeneratorControlStub:
        """The control service of a generator, once it has joined."""
        address = ""

        async def joined() -> bool:
            nonlocal address
            process = self._processes.get(member_id)
            assert process is None or process.returncode is None, (self.folder / f"{member_id}.log").read_text()[-3000:]
            members = await self.members()
            address = members[member_id].address if member_id in members else ""
            return bool(address)

        await eventually(joined)
        channel = open_channel(address, SECURITY)
        self.stack.push_async_callback(channel.close)
        return generator_pb2_grpc.GeneratorControlStub(channel)

    async def holds(self, control: generator_pb2_grpc.GeneratorControlStub, groups: int = 1) -> None:
        """Waits until a generator has that many groups in hand, and sequences in decoding."""

        async def at_work() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                status = await control.Status(generator_pb2.GeneratorStatusRequest(), timeout=180)
                return bool(status.groups_held >= groups and status.active_sequences)
            return False

        await eventually(at_work)

    async def holds_weights(self, member_id: str) -> None:
        """Waits until a generator has weights in service."""

        async def serving() -> bool:
            members = await self.members()
            return member_id in members and members[member_id].gauges.get("swaps", 0) > 0

        await eventually(serving)

    async def grants(self, count: int) -> list[buffer_pb2.GroupGrant]:
        """The number of groups that a generator would be granted now; they are released."""
        channel = open_channel(self.address, SECURITY)
        agent = MembershipAgent(
            channel, membership_pb2.ROLE_GENERATOR, member_id="taker", address="", host_id=host_id()
        )
        await agent.start()
        client = BufferClient(channel, timeout_s=5, retry_s=20)
        stream = client.admit("train", agent.member_id, agent.generation)
        stream.update(credits=count, serving=PolicyVersion(1, 0))
        async with asyncio.timeout(DEADLINE_S):
            found = [await anext(stream) for _ in range(count)]
        leases = [buffer_pb2.LeaseRef(group_id=grant.group_id, lease_id=grant.lease_id) for grant in found]
        await stream.close()
        await client.release("train", agent.member_id, agent.generation, leases)
        await agent.leave()
        await agent.stop()
        await channel.close()
        return found

    async def drafts(self) -> dict[tuple[str, int], Trajectory]:
        """Drafts of first holders of training groups, by group and member, as they are in Redis now."""
        server = self.buffer.redis
        assert server is not None
        async with redis.asyncio.Redis.from_url(server.admin_url) as client:
            keys = await client.keys(f"rollmesh:{self.config.run.name}:train:v:*:d1-*")
            payloads = await client.mget(keys) if keys else []
        found = {}
        for key, payload in zip(keys, payloads, strict=True):
            group_id, member, _ = key.decode().rsplit(":", 3)[1:]
            if payload is not None:
                found[group_id, int(member)] = decode(payload)
        return found

    async def gauge(self, member_id: str, name: str) -> float:
        """A metric of a generator, as of its last heartbeat."""
        members = await self.members()
        return members[member_id].gauges.get(name, 0.0) if member_id in members else 0.0

    async def members(self) -> dict[str, membership_pb2.Member]:
        """Generators in the mesh, by id."""
        channel = open_channel(self.address, SECURITY)
        agent = MembershipAgent(
            channel, membership_pb2.ROLE_GENERATOR, member_id="watcher", address="", host_id=host_id()
        )
        try:
            return {member.member_id: member for member in await agent.members(membership_pb2.ROLE_GENERATOR)}
        finally:
            await channel.close()


@asynccontextmanager
async def mesh(folder: Path, *, endless: bool = False, head_dim: int = 16, **overrides: Any) -> AsyncIterator[World]:
    """Buffer and Redis; everything that was started in it ends with it."""
    torch.set_num_threads(1)
    world = World(folder, settings(folder, **overrides), endless=endless, head_dim=head_dim)
    world.buffer = BufferFront(world.config, host="127.0.0.1", port=0)
    await world.buffer.start()
    world.address = world.buffer.address
    try:
        yield world
    finally:
        await world.stack.aclose()
        await world.buffer.stop()


def log_probs(model: PreTrainedModel, prompt: Iterable[int], response: Iterable[int]) -> np.ndarray[Any, Any]:
    """Natural log-probs of the response tokens under the model (temperature 1), float32."""
    prompt, response = list(prompt), list(response)
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def greedy_response(model: PreTrainedModel, prompt: Iterable[int], tokens: int) -> list[int]:
    """The most likely response of at most so many tokens, the end token included."""
    start = torch.tensor([list(prompt)])
    found = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=tokens)
    response: list[int] = found[0, start.shape[1] :].tolist()
    return response

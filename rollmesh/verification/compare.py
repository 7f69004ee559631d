"""Compares the weights of every generator with the learner's bytes of the same version.

Training may continue meanwhile. Small versions are fetched as they are announced, and the latest of them kept.
Otherwise a generator is asked first, and then its version is fetched from the learner. Where that is gone by then, the
generator is asked again. A verdict is final; `not compared`, with the last reason, is the verdict at the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from rollmesh.launcher.mesh_client import MeshClient
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import RollmeshError, UnreachableError, WeightsError
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.errors import to_rollmesh_error
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import generator_pb2, generator_pb2_grpc, membership_pb2, weights_pb2
from rollmesh.verification.published_weights import PublishedModel
from rollmesh.verification.verdict import GeneratorAnswer, LearnerReference, Verdict, judge

_PROBE_TIMEOUT_S = 30.0
_BETWEEN_TRIES_S = 0.2
# Versions with remembered announcements, and those with remembered bytes, if these are few: a new version may come
# before an old one is asked for.
_REMEMBERED = 64
_KEPT, _KEPT_BYTES = 32, 8 << 20
_PROBE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome.

    Attributes:
        learner: member id of the learner.
        verdicts: one per generator, by member id.
    """

    learner: str
    verdicts: list[Verdict]

    @property
    def verified(self) -> bool:
        """True where the mesh has generators, and all of them were compared and agree."""
        return bool(self.verdicts) and all(verdict.outcome == "agrees" for verdict in self.verdicts)


async def compare(
    mesh: str,
    security: SecuritySection,
    *,
    timeout_s: float,
    prompt: str | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Compares all generators of a mesh with its learner.

    Args:
        mesh: address.
        security: token and TLS of the mesh.
        timeout_s: how long versions are followed until every generator was compared.
        prompt: probe; none: token ids spread over the vocabulary.
        tolerance: largest difference of a log-prob that counts as equal, in nats; None: by the dtype.

    Raises:
        RollmeshError: the mesh or its learner does not answer, or the mesh has no learner.
    """
    async with MeshClient(mesh, security) as mesh_client:
        members = (await mesh_client.members()).members
    learner = next((m for m in members if m.role == membership_pb2.ROLE_LEARNER and m.address), None)
    if learner is None:
        raise UnreachableError(
            "the mesh has no learner to compare with", hint="`rollmesh status` shows the members; is the run over?"
        )
    generators = [member for member in members if member.role == membership_pb2.ROLE_GENERATOR]
    published = PublishedModel(learner.address, security, timeout_s=timeout_s)
    try:
        async with _announcements(published, timeout_s) as announced:
            loaded = await published.load(_widest_dtype(announced.newest()))
            ids = _probe_ids(loaded.tokenizer, prompt, int(loaded.model.config.get_text_config().vocab_size))
            context = min([loaded.context, *await _contexts(generators, security)])
            comparison = _GeneratorComparison(published, announced, ids[:context], tolerance, security)
            verdicts = await comparison.compare_all(generators, timeout_s)
    finally:
        await published.close()
    return Comparison(learner.member_id, sorted(verdicts, key=lambda verdict: verdict.member_id))


async def _contexts(generators: Sequence[membership_pb2.Member], security: SecuritySection) -> list[int]:
    """Context lengths of the generators that report one; others are asked again when they are compared."""

    async def ask(member: membership_pb2.Member) -> int:
        channel = open_channel(member.address, security)
        try:
            status = generator_pb2_grpc.GeneratorControlStub(channel).Status
            return int((await status(generator_pb2.GeneratorStatusRequest(), timeout=_PROBE_TIMEOUT_S)).context)
        except grpc.aio.AioRpcError:
            return 0
        finally:
            await channel.close()

    called = [member for member in generators if member.address]
    return [context for context in await asyncio.gather(*map(ask, called)) if context]


@dataclass(slots=True)
class _RecentVersions:
    """Manifests by version, and the bytes of some, the newest last; `ended`: why no more come."""

    manifests: dict[PolicyVersion, weights_pb2.Manifest] = field(default_factory=dict)
    data: dict[PolicyVersion, memoryview] = field(default_factory=dict)
    ended: str = ""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, manifest: weights_pb2.Manifest) -> None:
        self.manifests[PolicyVersion.from_proto(manifest.policy)] = manifest
        while len(self.manifests) > _REMEMBERED:
            del self.manifests[next(iter(self.manifests))]
        self.news.set()

    def store(self, manifest: weights_pb2.Manifest, data: memoryview) -> None:
        self.data[PolicyVersion.from_proto(manifest.policy)] = data
        while len(self.data) > _KEPT:
            del self.data[next(iter(self.data))]

    def newest(self) -> weights_pb2.Manifest:
        return next(reversed(self.manifests.values()))


@asynccontextmanager
async def _announcements(published: PublishedModel, timeout_s: float) -> AsyncIterator[_RecentVersions]:
    """Follows the learner's announcements while the block runs; the first one is there at its start."""
    announced = _RecentVersions()
    call = published.weights.Watch(weights_pb2.WatchRequest())

    async def follow() -> None:
        try:
            async for manifest in call:
                announced.add(manifest)
                if sum(bucket.nbytes for bucket in manifest.buckets) <= _KEPT_BYTES:
                    with contextlib.suppress(WeightsError):
                        announced.store(manifest, await published.fetch(manifest))
        except grpc.aio.AioRpcError as error:
            announced.ended = f"; the learner announces no more versions: {error.details()}"
            raise
        announced.ended = "; the learner announces no more versions"

    task = asyncio.create_task(follow(), name="follow-announcements")
    try:
        first = asyncio.create_task(announced.news.wait())
        await asyncio.wait({task, first}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if not announced.manifests:
            cause = task.exception() if task.done() and not task.cancelled() else None
            if isinstance(cause, grpc.aio.AioRpcError):
                raise to_rollmesh_error(cause, "announcements of the learner") from cause
            raise UnreachableError(f"the learner has announced no weights within {timeout_s:.0f} s")
        yield announced
    finally:
        call.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _GeneratorComparison:
    """Compares generators at the versions that they serve."""

    def __init__(
        self,
        published: PublishedModel,
        announced: _RecentVersions,
        token_ids: Sequence[int],
        tolerance: float | None,
        security: SecuritySection,
    ) -> None:
        self._published = published
        self._announced = announced
        self._token_ids = token_ids
        self._tolerance = tolerance
        self._security = security
        self._references: dict[PolicyVersion, LearnerReference] = {}
        # There is one model, and its memory is large.
        self._one_at_a_time = asyncio.Lock()

    async def compare_all(self, generators: Sequence[membership_pb2.Member], timeout_s: float) -> list[Verdict]:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        open_ones = {member.member_id: member for member in generators}
        verdicts: dict[str, Verdict] = {}
        while open_ones:
            self._announced.news.clear()
            found = await asyncio.gather(*(self._compare(member, until - loop.time()) for member in open_ones.values()))
            for verdict in found:
                verdicts[verdict.member_id] = verdict
                if verdict.outcome != "not compared":
                    del open_ones[verdict.member_id]
            if loop.time() >= until:
                break
            if open_ones:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._announced.news.wait(), _BETWEEN_TRIES_S)
        return list(verdicts.values())

    async def _compare(self, member: membership_pb2.Member, time_left_s: float) -> Verdict:
        try:
            answer = await self._ask(member, max(1.0, min(time_left_s, _PROBE_TIMEOUT_S)))
            manifest = self._announced.manifests.get(answer.policy)
            if manifest is None:
                newest = PolicyVersion.from_proto(self._announced.newest().policy)
                why = f"it serves {answer.policy}, which was not announced to this command; the learner is at {newest}"
                why += self._announced.ended
                return Verdict(member.member_id, "not compared", why, answer.policy, answer.found or answer.announced)
            return judge(answer, await self._reference(manifest))
        except RollmeshError as error:
            return Verdict(member.member_id, "not compared", error.message)

    async def _ask(self, member: membership_pb2.Member, timeout_s: float) -> GeneratorAnswer:
        if not member.address:
            raise UnreachableError(f"generator {member.member_id} has no address that others can call: give it --host")
        channel = open_channel(member.address, self._security)
        try:
            control = generator_pb2_grpc.GeneratorControlStub(channel)
            response = await control.Probe(generator_pb2.ProbeRequest(token_ids=self._token_ids), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise to_rollmesh_error(error, f"generator {member.member_id} at {member.address}") from error
        finally:
            await channel.close()
        if not response.found_digest and not response.not_comparable:
            raise WeightsError(f"generator {member.member_id} reported nothing about its weights")
        return GeneratorAnswer(
            member.member_id,
            PolicyVersion.from_proto(response.serving),
            response.announced_digest,
            response.found_digest,
            response.not_comparable,
            list(response.differing),
            list(response.log_probs),
        )

    async def _reference(self, manifest: weights_pb2.Manifest) -> LearnerReference:
        policy = PolicyVersion.from_proto(manifest.policy)
        async with self._one_at_a_time:
            if policy not in self._references:
                data = self._announced.data.get(policy) or await self._published.fetch(manifest)
                reference = self._published.reference(manifest, data, self._token_ids, self._tolerance)
                self._references[policy] = await reference
            return self._references[policy]


def _widest_dtype(manifest: weights_pb2.Manifest) -> str:
    """Dtype of the reference: that of most weights, or float32 for narrower ones."""
    by_dtype: dict[str, int] = {}
    for entry in (manifest.base if manifest.HasField("base") else manifest).tensors:
        by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + entry.nbytes
    dtype = max(by_dtype, key=lambda name: by_dtype[name])
    return dtype if dtype in ("float32", "bfloat16", "float16") else "float32"


def _probe_ids(tokenizer: object, prompt: str | None, vocabulary: int) -> list[int]:
    if prompt is None:
        # Spread by a step that shares no factor with any usual size.
        return [(index * 7919 + 11) % vocabulary for index in range(_PROBE_TOKENS)]
    if not callable(tokenizer):
        raise UnreachableError("the learner's model has no tokenizer for --prompt", hint="leave --prompt out")
    ids: list[int] = tokenizer(prompt)["input_ids"]
    if len(ids) < 2:
        raise UnreachableError(f"--prompt has {len(ids)} token(s), at least two are needed", hint="give a longer one")
    return ids

"""Metrics for Prometheus, which the page on operation lists too."""

from __future__ import annotations

import asyncio
import json

import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

from rollmesh.buffer.server.metrics import METRICS, registry_of
from rollmesh.mesh.access.token_file import GRANT_GAUGE
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.buffer.mesh_fixture import Mesh, make_failure, make_write
from tests.command import Command

V0 = PolicyVersion(1, 0)


async def test_every_figure_of_a_table_is_told_with_its_type(mesh: Mesh) -> None:
    front, learner, generator, _, grants = await mesh.granted(4, seeded=6)
    writer, sampler = generator.writer(), learner.sampler()
    await generator.finish(writer, grants[:2], V0)
    await writer.write([make_write(grants[0], 0, [V0])])
    await writer.write([make_failure(grants[2], m) for m in range(2)])
    groups = await learner.batch(sampler, 2, 0)
    assert (await learner.train(groups, 0)).claimed

    generator.agent.set_status(gauges={GRANT_GAUGE: 90.0})
    await generator.agent.heartbeat()
    assert front.metrics is not None
    await front.metrics.read()
    told = prometheus_client.generate_latest(registry_of(front.metrics)).decode()
    families = {f.name: f for f in text_string_to_metric_families(told)}
    values = {
        (sample.name.removeprefix("rollmesh_buffer_"), frozenset(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }

    def value(name: str, *labels: str) -> float:
        return values[name, frozenset(labels)]

    for metric in METRICS:
        assert families[f"rollmesh_buffer_{metric.name}"].type == metric.kind, metric.name
    assert value("groups_admitted_total", "train") == 4
    assert value("groups_ended_total", "train", "failed", "too_few_scored") == 1
    assert {s: value("groups", "train", s) for s in ("generating", "ready", "leased", "consumed")} == {
        "generating": 1, "ready": 0, "leased": 0, "consumed": 2,
    }  # fmt: skip
    assert (value("uses", "train"), value("writes_duplicate_total", "train")) == (2, 1)
    assert (value("leases", "train"), value("dead_letters", "train")) == (1, 1)
    assert value("payload_bytes", "train") == value("consumed_bytes", "train") > 0
    assert value("reserved_bytes", "train") > 0
    assert 0 < value("oldest_generating_seconds", "train") < 60
    assert value("oldest_ready_seconds", "train") == 0
    assert value("redis_used_memory_bytes") > 0
    assert (value("members", "buffer"), value("members", "generator"), value("members", "learner")) == (1, 1, 1)
    assert value("grant_seconds_left", "generator") == 90
    assert value("generators_waiting", "train") == 0
    assert value("writes_in_progress") == 0
    for name in ("time_to_seal_seconds", "time_queued_seconds"):
        assert value(f"{name}_count", "train") == 2
        assert value(f"{name}_bucket", "train", "+Inf") == 2


async def test_a_ready_group_grows_old_until_it_is_leased(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission, writer = generator.admission(), generator.writer()
    admission.update(1, V0)
    await generator.finish(writer, await generator.grants(admission, 1), V0)
    first = (await learner.client.describe("train")).oldest_ready_ms
    later = first
    while later <= first:
        later = (await learner.client.describe("train")).oldest_ready_ms
    assert (await learner.client.describe("train")).oldest_generating_ms == 0


async def test_status_says_it_to_a_reader_and_to_a_program(mesh: Mesh, rollmesh: Command) -> None:
    front, _, generator, _, grants = await mesh.granted(3, seeded=6)
    writer = generator.writer()
    await generator.finish(writer, grants[:1], V0)
    await writer.write([make_failure(grants[1], m) for m in range(2)])
    command = ("status", "--mesh", front.address)
    text, told = [(await asyncio.to_thread(rollmesh, *command, *options)).stdout for options in ((), ("--json",))]
    for words in (
        "1 ready, oldest ",
        "failed (too few scored) 1",
        "failed groups kept with their causes 1",
        "Redis ",
    ):
        assert words in text, text
    assert "\x1b" not in text, "no colours outside a terminal"
    everything = json.loads(told)
    assert everything["tables"]["train"]["counts"]["reasons"] == {"failed/too_few_scored": 1}
    assert everything["tables"]["train"]["oldest_ready_ms"] >= 0
    assert {member["address"] for member in everything["members"]} >= {front.address}

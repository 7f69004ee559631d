"""Several fronts on one Redis, and fronts that are replaced under their clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.service import without_secrets
from mesh.errors import RollmeshError
from mesh.versions import PolicyVersion
from protos import membership_pb2
from tests.buffer.mesh_fixture import Mesh, make_config, make_write
from tests.buffer.test_flow import balanced

V0 = PolicyVersion(1, 0)


async def test_two_fronts_serve_one_run(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    left, right = await mesh.front(config), await mesh.front(config)
    learner, generator = await mesh.learner(left), await mesh.generator(right)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(4, V0)
    sampler.request(2, 0)
    await learner.seed(1, 4)  # the other front hears of it
    await generator.finish(writer, await generator.grants(admission, 2), V0)
    groups = await learner.collect(sampler, 2)
    assert (await learner.train(groups, 0)).claimed
    members = (await learner.membership.List(membership_pb2.ListRequest(), timeout=5)).members
    fronts = {m.address for m in members if m.role == membership_pb2.ROLE_BUFFER}
    assert fronts == {left.address, right.address}
    assert {m.role for m in members if m.address not in fronts} == {
        membership_pb2.ROLE_LEARNER,
        membership_pb2.ROLE_GENERATOR,
    }
    await balanced(learner)


async def test_clients_carry_on_when_their_front_is_replaced(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    front = await mesh.front(config)
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 4)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(2, V0)
    grants = await generator.grants(admission, 2)
    await writer.write([make_write(grants[0], 0, [V0])])
    sampler.request(2, 0)
    port = int(front.address.rpartition(":")[2])
    await mesh.stop_front(front)
    fresh = await mesh.front(config, port=port)
    results = await writer.write([make_write(g, m, [V0]) for g in grants for m in range(2)])
    assert {r.group_id for r in results} == {g.group_id for g in grants}
    groups = await learner.collect(sampler, 2)
    assert (await learner.train(groups, 0)).claimed
    assert fresh.address == front.address
    counts = await balanced(learner)
    assert (counts.consumed, counts.duplicate_writes) == (2, 1)


async def test_the_run_configuration_reaches_whoever_joins(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    generator = await mesh.generator(await mesh.front(config))
    assert type(config).model_validate_json(generator.agent.config_json) == config
    assert generator.agent.run_name == config.run.name


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://user:s3cret@host:1/2", "redis://host:1/2"),
        ("rediss-cluster://user:s3cret@a:1,b:2,[::1]:3?ssl_ca_certs=/x@y", "rediss-cluster://a:1,b:2,[::1]:3?ssl_ca_certs=/x@y"),
        ("unix://:s3cret@/run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("redis://host:1/2", "redis://host:1/2"),
    ],
)  # fmt: skip
def test_secrets_stay_here(tmp_path: Path, url: str, told: str) -> None:
    config = without_secrets(make_config(tmp_path, url))
    assert config.buffer.redis == told
    assert "s3cret" not in config.model_dump_json()
    assert type(config).model_validate_json(config.model_dump_json()) == config


async def test_an_oversized_message_is_refused_by_name(mesh: Mesh) -> None:
    front = await mesh.front(network={"max_message_mb": 1})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission, writer = generator.admission(), generator.writer()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    with pytest.raises(RollmeshError, match="larger than max"):
        await writer.write([make_write(grant, 0, [V0] * 200_000)])


async def test_a_finished_run_is_announced(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.agent.leave(run_finished=True)
    await generator.agent.beat()
    assert generator.agent.run_finished.is_set()
    assert generator.agent.learner is None

"""Coverage-guided fuzzing (atheris) of what reads bytes from outside.

`python -m tests.fuzz.coverage_guided -runs=100000`; arguments are libFuzzer's (`-max_total_time=S`, a folder with a
corpus). The one property: whatever the bytes, reading them either raises `PayloadError`, or gives a trajectory that
agrees with its own description.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["mesh", "buffer"]):
    from rollmesh.buffer.protocol.payload_framing import split_parser, split_payloads
    from rollmesh.buffer.server.member_validation import check_write
    from rollmesh.mesh.errors import PayloadError
    from rollmesh.mesh.trajectory import payload_codec
    from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns

import numpy as np
from google.protobuf.message import DecodeError

from rollmesh.protos import buffer_pb2, trajectory_pb2

MAX_BYTES = 1 << 14
PARSE = split_parser(buffer_pb2.WriteRequest, "payloads")


def examples() -> list[bytes]:
    """Payloads to begin with."""
    found = []
    sizes: list[tuple[int, payload_codec.Codec]] = [(1, "none"), (300, "none"), (300, "zstd")]
    for count, codec in sizes:
        versions = VersionRuns.merged((1, PolicyVersion(1, i // 100)) for i in range(count))
        mask = np.ones(count, np.uint8)
        mask[count // 2 : count // 2 + 3] = 0
        response = payload_codec.Trajectory(
            np.arange(count, dtype=np.int32), np.full(count, -0.5, np.float32), mask, versions
        )
        found.append(payload_codec.encode(response, codec=codec))
    return found


def read_payload(data: bytes) -> None:
    """Header and arrays."""
    try:
        info = payload_codec.inspect(data)
        response = payload_codec.decode(data)
    except PayloadError:
        return
    count = info.response_tokens
    assert len(response.response_ids) == len(response.log_probs) == len(response.response_mask) == count
    assert len(response.versions) == count


def read_write(data: bytes) -> None:
    """Members as the front checks them: those of a message, or a good one with these bytes as payload."""
    meta = trajectory_pb2.MemberMeta(outcome=trajectory_pb2.OUTCOME_SCORED, prompt_tokens=1, response_tokens=1)
    write = buffer_pb2.MemberWrite(group_id="train-1", lease_id="a1", attempt=1, meta=meta)
    pairs = [(write, data)]
    try:
        parts = PARSE(data)
        writes = parts.message.writes
        payloads = split_payloads(parts.payloads, [write.payload_bytes for write in writes])
        pairs += [(write, bytes(payload)) for write, payload in zip(writes, payloads, strict=True)]
    except (DecodeError, PayloadError):
        pass
    for write, payload in pairs:
        try:
            checked = check_write(write, payload)
        except PayloadError:
            continue
        assert checked.group_id
        assert checked.size >= len(checked.payload)


def one_input(data: bytes) -> None:
    read_payload(data)
    read_write(data)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for index, example in enumerate(examples()):
            (Path(folder) / str(index)).write_bytes(example)
        atheris.Setup([*sys.argv, f"-max_len={MAX_BYTES}", "-rss_limit_mb=2048", "-timeout=10", folder], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

"""The generated modules are up to date, the rule of compatible change holds, and every field is documented."""

import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from rollmesh.protos import generate

PROTOS = sorted((generate.ROOT / "protos").glob("*.proto"))


def test_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    generate.generate(tmp_path)
    for fresh in sorted((tmp_path / "rollmesh" / "protos").iterdir()):
        committed = generate.ROOT / "protos" / fresh.name
        assert committed.read_bytes() == fresh.read_bytes(), f"{fresh.name} is out of date: run `make protos`"


def test_committed_descriptors_match_the_proto_files() -> None:
    assert generate.compare(generate.committed_descriptors(), generate.descriptors()) == []
    assert generate.committed_descriptors() == generate.descriptors(), "run `make protos`"


@pytest.mark.parametrize(
    ("change", "breach"),
    [
        (lambda m: m.field[0].__setattr__("type", descriptor_pb2.FieldDescriptorProto.TYPE_STRING), "changed its name"),
        (lambda m: m.field[0].__setattr__("name", "other"), "changed its name"),
        (lambda m: m.field.__delitem__(0), "without reserving number 1"),
    ],
)
def test_an_incompatible_change_is_named(change, breach: str) -> None:
    old = generate.committed_descriptors()
    new = descriptor_pb2.FileDescriptorSet.FromString(old.SerializeToString())
    message = next(m for f in new.file for m in f.message_type if m.name == "PolicyVersion")
    change(message)
    assert any(breach in line for line in generate.compare(old, new))


def test_an_added_field_is_compatible() -> None:
    old = generate.committed_descriptors()
    new = descriptor_pb2.FileDescriptorSet.FromString(old.SerializeToString())
    message = next(m for f in new.file for m in f.message_type if m.name == "PolicyVersion")
    message.field.add(name="added", number=99, type=descriptor_pb2.FieldDescriptorProto.TYPE_BOOL)
    assert generate.compare(old, new) == []


@pytest.mark.parametrize("path", PROTOS, ids=lambda p: p.name)
def test_every_file_says_what_it_is_and_uses_the_package(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("//")
    assert "package rollmesh.v1;" in text


def test_the_reward_contract_stands_alone() -> None:
    text = (generate.ROOT / "protos" / "reward.proto").read_text()
    assert not re.search(r"^import ", text, re.MULTILINE)


_MEMBER = re.compile(r"\s+(?:rpc \w+\b.*|[\w.<>, ]+\s+\w+\s*=\s*\d+;|\w+ = \d+;)")


@pytest.mark.parametrize("path", PROTOS, ids=lambda p: p.name)
def test_every_field_value_and_method_is_documented(path: Path) -> None:
    lines = path.read_text().splitlines()
    bare = [
        f"{number + 1}: {line.strip()}"
        for number, line in enumerate(lines)
        if _MEMBER.match(line) and "_UNSPECIFIED" not in line and not lines[number - 1].strip().startswith("//")
    ]
    assert bare == []

"""Generates the protobuf modules and the descriptor set from protos/*.proto (`make protos`).

`descriptors.binpb` is the contract as last released. `compare` holds it against the .proto files under the rule of
compatible change. Fields, values and methods are only added; a number, name, type or label never changes; a removed one
is reserved.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Writes the generated modules below `out`/rollmesh/protos.

    Raises:
        RuntimeError: where protoc refuses a file; its message goes to stderr.
    """
    _protoc(f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}")


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    """The descriptors of the .proto files as they are now."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "descriptors.binpb"
        _protoc(f"--descriptor_set_out={path}")
        return descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())


def committed_descriptors() -> descriptor_pb2.FileDescriptorSet:
    """The descriptors that the tree carries."""
    return descriptor_pb2.FileDescriptorSet.FromString((ROOT / "protos" / "descriptors.binpb").read_bytes())


def compare(old: descriptor_pb2.FileDescriptorSet, new: descriptor_pb2.FileDescriptorSet) -> list[str]:
    """Every breach of the rule of compatible change, in words; empty when `new` may replace `old`."""
    breaches: list[str] = []
    old_messages, new_messages = dict(_messages(old)), dict(_messages(new))
    for name, message in old_messages.items():
        if name not in new_messages:
            breaches.append(f"message {name} is gone")
        else:
            breaches.extend(_compare_fields(name, message, new_messages[name]))
    old_enums, new_enums = dict(_enums(old)), dict(_enums(new))
    for name, values in old_enums.items():
        now = new_enums.get(name, {})
        breaches.extend(
            f"enum value {name}.{key} = {number} changed" for key, number in values.items() if now.get(key) != number
        )
    new_methods = dict(_methods(new))
    breaches.extend(f"method {name} changed" for name, shape in _methods(old) if new_methods.get(name) != shape)
    return breaches


def _compare_fields(
    name: str, old: descriptor_pb2.DescriptorProto, new: descriptor_pb2.DescriptorProto
) -> Iterator[str]:
    now = {field.number: field for field in new.field}
    reserved = {number for span in new.reserved_range for number in range(span.start, span.end)}
    for field in old.field:
        current = now.get(field.number)
        if current is None:
            if field.number not in reserved:
                yield f"field {name}.{field.name} was removed without reserving number {field.number}"
        elif (current.name, current.type, current.type_name, current.label) != (
            field.name,
            field.type,
            field.type_name,
            field.label,
        ):
            yield f"field {name}.{field.name} (number {field.number}) changed its name, type or label"


def _messages(files: descriptor_pb2.FileDescriptorSet) -> Iterator[tuple[str, descriptor_pb2.DescriptorProto]]:
    for file in files.file:
        for message in file.message_type:
            yield f"{file.package}.{message.name}", message


def _enums(files: descriptor_pb2.FileDescriptorSet) -> Iterator[tuple[str, dict[str, int]]]:
    for file in files.file:
        for enum in file.enum_type:
            yield f"{file.package}.{enum.name}", {value.name: value.number for value in enum.value}


def _methods(files: descriptor_pb2.FileDescriptorSet) -> Iterator[tuple[str, tuple[str, str, bool, bool]]]:
    for file in files.file:
        for service in file.service:
            for method in service.method:
                shape = (method.input_type, method.output_type, method.client_streaming, method.server_streaming)
                yield f"{service.name}.{method.name}", shape


def _protoc(*arguments: str) -> None:
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "rollmesh" / "protos").glob("*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    status = protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *arguments, *sources])
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}")


def main() -> int:
    """Generates everything; refuses an incompatible change."""
    breaches = compare(committed_descriptors(), descriptors())
    if breaches:
        sys.stderr.write("incompatible change of the contracts:\n" + "\n".join(f"  {b}" for b in breaches) + "\n")
        return 1
    generate(ROOT)
    (ROOT / "protos" / "descriptors.binpb").write_bytes(descriptors().SerializeToString(deterministic=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())

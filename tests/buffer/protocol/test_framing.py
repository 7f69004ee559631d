"""A message put together from serialized parts is the message that protobuf would have made."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.buffer.protocol.framing import field_header, repeated_field
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory

_NUMBER = {name: field.number for name, field in pb.LeasedGroup.DESCRIPTOR.fields_by_name.items()}


@settings(max_examples=25)
@given(
    st.builds(trajectory.PromptTask, task_id=st.text(max_size=300), prompt_ids=st.binary(max_size=300)),
    st.lists(st.builds(trajectory.MemberMeta, reward=st.floats(allow_nan=False), reason=st.text(max_size=200))),
)
def test_spliced_groups_parse_as_built_ones(task: trajectory.PromptTask, members: list[trajectory.MemberMeta]) -> None:
    prompt = task.SerializeToString()
    group = b"".join(
        [
            pb.LeasedGroup(group_id="g", attempt=3).SerializeToString(),
            field_header(_NUMBER["task"], len(prompt)),
            prompt,
            *repeated_field(_NUMBER["members"], [meta.SerializeToString() for meta in members]),
        ]
    )
    number = pb.SampleResponse.DESCRIPTOR.fields_by_name["groups"].number
    response = pb.SampleResponse.FromString(b"".join(repeated_field(number, [group, group])))
    built = pb.LeasedGroup(group_id="g", attempt=3, task=task, members=members)
    assert list(response.groups) == [built, built]

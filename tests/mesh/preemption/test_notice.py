"""Answers of metadata services, read: real forms of the answers, the time that is left, and answers that are none."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.preemption.notice import AWS_S, AZURE_S, Notice, of_aws, of_azure, of_file, of_gcp

NOW = datetime(2027, 1, 31, 8, 20, 0, tzinfo=UTC)


def aws(**fields: object) -> str:
    return json.dumps({"action": "terminate", "time": "2027-01-31T08:21:30Z", **fields})


def azure(**fields: object) -> str:
    event = {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["gpu_3", "gpu_7"],
        "EventStatus": "Scheduled",
        "NotBefore": "Sun, 31 Jan 2027 08:20:20 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **fields,
    }
    return json.dumps({"DocumentIncarnation": 2, "Events": [event]})


def test_aws() -> None:
    assert of_aws(aws(), NOW) == Notice("AWS will terminate this spot instance", 90.0)
    assert of_aws(aws(action="stop"), NOW).reason == "AWS will stop this spot instance"
    assert of_aws(aws(action="hibernate"), NOW).within_s == 0.0, "it begins at once"


@given(st.timedeltas(timedelta(days=-400), timedelta(days=400)))
def test_a_clock_that_is_wrong_gives_no_more_than_the_cloud_promises(ahead: timedelta) -> None:
    assert 0.0 <= of_aws(aws(), NOW + ahead).within_s <= AWS_S
    notice = of_azure(azure(), "gpu_7", NOW + ahead)
    assert notice is not None
    assert 0.0 <= notice.within_s <= AZURE_S


def test_gcp() -> None:
    assert of_gcp("FALSE") is None
    assert of_gcp("TRUE\n") == Notice("Google Cloud preempts this machine", 30.0)


def test_azure_tells_the_events_of_a_whole_scale_set() -> None:
    assert of_azure(azure(), "gpu_7", NOW) == Notice("Azure plans Preempt for this machine", 20.0)
    assert of_azure(azure(), "gpu_8", NOW) is None
    assert of_azure(azure(EventType="Freeze"), "gpu_7", NOW) is None, "its processes stay"
    assert of_azure('{"DocumentIncarnation": 1, "Events": []}', "gpu_7", NOW) is None
    begun = of_azure(azure(EventStatus="Started", NotBefore=""), "gpu_7", NOW)
    assert begun is not None
    assert begun.within_s == 0.0


def test_a_file_may_say_how_many_seconds_are_left() -> None:
    assert of_file("", "/run/notice", 30.0) == Notice("/run/notice says that this machine ends", 30.0)
    assert of_file("12.5\n", "/run/notice", 30.0).within_s == 12.5


@pytest.mark.parametrize("answer", ["", "<html>", "[]", "{}", '{"action": 1, "time": 2}', aws(time="soon")])
def test_answers_that_are_no_notice_of_aws(answer: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  any: the source says which service it was
        of_aws(answer, NOW)


def test_answers_that_are_no_notice_of_others() -> None:
    for parse in (
        lambda: of_gcp("<html>"),
        lambda: of_azure("{}", "gpu_7", NOW),
        lambda: of_azure(azure(NotBefore="soon"), "gpu_7", NOW),
        lambda: of_file("soon", "f", 30.0),
        lambda: of_file("inf", "f", 30.0),
        lambda: of_file("-1", "f", 30.0),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            parse()

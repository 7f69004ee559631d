"""Traces and metrics of a run, as a collector and Prometheus must have them."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from rollmesh.telemetry.all_metrics import metric_of
from tests.collector import Collected, Collector

# Span -> its service, and the span that it lies in.
WHOLE = {
    "trajectory": ("learner", ""),
    "admit": ("buffer", "trajectory"),
    "generate": ("generator", "trajectory"),
    "reward": ("generator", "trajectory"),
    "write": ("generator", "trajectory"),
    "store": ("buffer", "write"),
    "queue": ("buffer", "trajectory"),
    "claim": ("learner", "trajectory"),
    "train": ("learner", "trajectory"),
    "commit": ("learner", "trajectory"),
}
_VERSION = {"step": "learner", "publish": "learner", "receive": "generator"}


def audit_traces(collector: Collector, trained: int, *, reward_service: bool) -> None:
    """Every trained member has one whole trace; every step has one that leads to it.

    Args:
        trained: members that were trained and committed.
        reward_service: rewards come from a service of their own.
    """
    traces = collector.by_trace()
    whole = [spans for spans in traces.values() if _fate(spans) == "trained"]
    assert len(whole) == trained
    for spans in whole:
        _audit_trajectory(spans, reward_service=reward_service)
    steps = {trace for trace, spans in traces.items() if any(span.name == "step" for span in spans)}
    assert {link for spans in whole for span in spans for link in span.links} == steps
    complete = [
        trace for trace in steps if {span.name: span.service for span in traces[trace]}.items() >= _named(_VERSION)
    ]
    assert complete, "a version was trained, published and received"


def audit_metrics(page: str) -> None:
    """Every metric of a service is in the reference, with its type and labels; the event loop has been measured."""
    told = [family for family in text_string_to_metric_families(page) if family.name.startswith("rollmesh_")]
    # The client library adds to counters and histograms when they began.
    families = [family for family in told if not family.name.endswith("_created")]
    for family in families:
        spec = metric_of(family.name if family.type != "counter" else f"{family.name}_total")
        assert spec.kind == family.type, family.name
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        assert labels <= set(spec.labels), family.name
    assert {"rollmesh_event_loop_lag_seconds", "rollmesh_trace_spans"} <= {family.name for family in families}


def _named(services: dict[str, str]) -> set[tuple[str, str]]:
    return {(name, f"rollmesh-{service}") for name, service in services.items()}


def _fate(spans: Sequence[Collected]) -> str:
    return next((str(span.attributes["fate"]) for span in spans if span.name == "trajectory"), "")


def _audit_trajectory(spans: Sequence[Collected], *, reward_service: bool) -> None:
    expected = {**WHOLE, **({"score": ("reward", "reward")} if reward_service else {})}
    by_name = {span.name: span for span in spans}
    assert by_name.keys() == expected.keys()
    for name, (service, parent) in expected.items():
        span = by_name[name]
        assert span.service == f"rollmesh-{service}", name
        assert span.parent_id == (by_name[parent].span_id if parent else ""), name
    root, train, generate = by_name["trajectory"], by_name["train"], by_name["generate"]
    version = train.attributes["train_version"]
    assert generate.attributes["newest_version"] == root.attributes["newest_version"]
    assert int(root.attributes["newest_version"].partition(":")[2]) <= version
    assert by_name["commit"].attributes["committed_version"] > version
    assert [name for name, _ in generate.events].count("weights") >= 1
    order = [by_name[name].began_ns for name in ("admit", "generate", "reward", "write", "claim", "commit")]
    assert order == sorted(order)

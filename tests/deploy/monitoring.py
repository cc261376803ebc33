"""Alerts and dashboard against the metrics that the code has."""

import json
from collections.abc import Iterator
from typing import Any

import promql_parser

from dataservice.observability.metrics import PrometheusMetrics
from dataservice.observability.series import series_of
from dataservice.observability.worker_metrics import worker_registry
from tests.deploy.cluster import Cluster

# What Prometheus itself adds to a series of a monitor's target.
TARGET_LABELS = {"namespace", "service", "pod", "instance", "container", "endpoint", "le"}
Usage = tuple[str, set[str]]
"""A series' name and the labels that an expression wants of it."""


def series_of_code() -> dict[str, set[str]]:
    """Every series that the coordinator or a worker may show, with its labels."""
    worker = worker_registry("worker", slots=1, read=lambda: None)  # type: ignore[arg-type,return-value]
    known = [*series_of(PrometheusMetrics().registry), *series_of(worker)]
    return {"up": set()} | {name: set(each.labels) for each in known for name in each.scraped}


def used(expression: str) -> Iterator[Usage]:
    """The series that an expression reads. Raises ValueError where it is no PromQL."""
    yield from _walk(promql_parser.parse(expression), set())


def _walk(node: Any, labels: set[str]) -> Iterator[Usage]:
    match node:
        case promql_parser.VectorSelector():
            matched = {each.name for each in node.matchers.matchers}
            yield node.name, matched | labels
        case promql_parser.MatrixSelector():
            yield from _walk(node.vector_selector, labels)
        case promql_parser.BinaryExpr():
            on = (
                set(node.modifier.matching.labels)
                if node.modifier and node.modifier.matching
                else set()
            )
            yield from _walk(node.lhs, labels | on)
            yield from _walk(node.rhs, labels | on)
        case promql_parser.AggregateExpr():
            by = set(node.modifier.labels) if node.modifier else set()
            yield from _walk(node.expr, by)
        case promql_parser.Call():
            for each in node.args:
                yield from _walk(each, labels)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from _walk(node.expr, labels)


def expressions(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """(where, expression) of all alerts and panels."""
    for rules in cluster.of("PrometheusRule"):
        for group in rules["spec"]["groups"]:
            for rule in group["rules"]:
                yield rule["alert"], rule["expr"]
    for found in cluster.of("ConfigMap"):
        if found["metadata"].get("labels", {}).get("grafana_dashboard") == "1":
            for text in found["data"].values():
                for panel in json.loads(text)["panels"]:
                    for target in panel.get("targets", ()):
                        yield f"panel {panel['title']!r}", target["expr"]


def mistakes(cluster: Cluster) -> Iterator[str]:
    """Expressions that would never have a value."""
    known = series_of_code()
    for where, expression in expressions(cluster):
        try:
            usages = list(used(expression))
        except ValueError as error:
            yield f"{where}: {error}"
            continue
        for name, labels in usages:
            if name not in known:
                yield f"{where}: no metric of the code is called {name}"
            elif strange := labels - known[name] - TARGET_LABELS:
                yield f"{where}: {name} has no label {sorted(strange)}"
    for kind in ("PrometheusRule", "ServiceMonitor", "PodMonitor"):
        for found in cluster.of(kind):
            if not found["metadata"].get("labels", {}).get("release"):
                yield f"{kind} has no label `release`: kube-prometheus-stack does not select it"
    for monitor in (*cluster.of("ServiceMonitor"), *cluster.of("PodMonitor")):
        spec = monitor["spec"]
        for endpoint in spec.get("endpoints", ()) or spec["podMetricsEndpoints"]:
            if not endpoint.get("honorLabels"):
                yield f"{monitor['kind']}: Prometheus would rename labels of our series"
            if endpoint.get("path") != "/metrics":
                yield f"{monitor['kind']}: the code serves /metrics, not {endpoint.get('path')}"

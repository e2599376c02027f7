"""Writes the Grafana dashboard of storesvc, ``storesvc.json``.

Run ``python deploy/grafana/dashboard.py`` after a change. Every expression is evaluated
against a live server by tests/deploy/test_monitoring.py.
"""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

_WINDOW: Final = "[$__rate_interval]"
_SERVERS: Final = 'job=~"$job",instance=~"$instance"'
_STREAMS: Final = (
    "storesvc.v1.*/(WriteChunks|ReadChunks|FindChunks|ReadManifest|WatchCheckpoints|"
    "VerifyCheckpoint|CollectGarbage|BeginUpload|JoinUpload|FinishWriter)|grpc.health.*"
)
"""Methods whose duration depends on the client or on the size of the data."""


class Panel(NamedTuple):
    """One panel: a title, a unit of Grafana, and expressions by legend."""

    title: str
    unit: str
    lines: dict[str, str]
    description: str
    width: int = 8
    is_number: bool = False


def _number(title: str, unit: str, expression: str, description: str) -> Panel:
    return Panel(title, unit, {"": expression}, description, width=4, is_number=True)


def rate(metric: str, *, by: str = "", **labels: str) -> str:
    """Returns the rate of a counter per second."""
    chosen = "".join(f',{name}=~"{value}"' for name, value in labels.items())
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{_SERVERS}{chosen}}}{_WINDOW}))"


def quantile(share: float, metric: str, *, by: str = "", unlike: str = "") -> str:
    """Returns a quantile of a histogram."""
    grouped = f"le, {by}" if by else "le"
    rest = f',grpc_method!~"{unlike}"' if unlike else ""
    buckets = f"rate({metric}_bucket{{{_SERVERS}{rest}}}{_WINDOW})"
    return f"histogram_quantile({share}, sum by ({grouped}) ({buckets}))"


def newest(metric: str) -> str:
    """Returns the largest value of a gauge over all servers."""
    return f"max ({metric}{{{_SERVERS}}})"


ROWS: Final = {
    "Overview": [
        Panel(
            "Servers",
            "none",
            {"up": f"sum (up{{{_SERVERS}}})"},
            "Servers that answer.",
            width=4,
            is_number=True,
        ),
        _number(
            "Checkpoints",
            "none",
            newest("storesvc_checkpoints"),
            "Committed checkpoints at the last collection.",
        ),
        _number(
            "Stored",
            "bytes",
            newest("storesvc_stored_bytes"),
            "Bytes that they occupy.",
        ),
        _number(
            "Open uploads",
            "none",
            newest("storesvc_uploads_open"),
            "Uploads that were open at the last collection.",
        ),
        _number(
            "Since the last collection",
            "s",
            f"time() - {newest('storesvc_gc_last_success_timestamp_seconds')}",
            "Time since a complete pass of the garbage collection.",
        ),
        _number(
            "Certificate expires in",
            "s",
            "min (storesvc_tls_certificate_expiry_timestamp_seconds"
            f"{{{_SERVERS}}}) - time()",
            "The first TLS certificate to expire.",
        ),
    ],
    "Saves and restores": [
        Panel(
            "Bytes",
            "Bps",
            {
                "{{direction}} {{path}}": rate(
                    "storesvc_chunk_bytes_total", by="direction, path"
                )
            },
            "Stored chunks between clients and the storage.",
        ),
        Panel(
            "Committed bytes",
            "Bps",
            {"{{source}}": rate("storesvc_committed_bytes_total", by="source")},
            "Chunks of committed checkpoints: sent, or reused from an earlier one.",
        ),
        Panel(
            "Commits",
            "cps",
            {
                "committed": rate("storesvc_commits_total"),
                "failed: {{reason}}": rate(
                    "storesvc_commit_failures_total", by="reason"
                ),
            },
            "Commits per second.",
        ),
        Panel(
            "Duration of commits",
            "s",
            {
                "median": quantile(0.5, "storesvc_commit_duration_seconds"),
                "99 %": quantile(0.99, "storesvc_commit_duration_seconds"),
            },
            "From the call to the checkpoint.",
        ),
        Panel(
            "Age of the newest checkpoint",
            "s",
            {
                "{{namespace}}/{{run}}": "time() - max by (namespace, run) "
                "(storesvc_checkpoint_newest_timestamp_seconds"
                f"{{{_SERVERS}}})"
            },
            "Of the runs that --metrics-run lists.",
        ),
        Panel(
            "Damages found",
            "none",
            {"{{kind}}": f"sum by (kind) (storesvc_damage_found_total{{{_SERVERS}}})"},
            "Damages that verifications have found since the start of the servers.",
        ),
    ],
    "Calls": [
        Panel(
            "Calls",
            "reqps",
            {
                "{{grpc_method}}": rate(
                    "grpc_server_call_started_total", by="grpc_method"
                )
            },
            "Calls per second, by method.",
        ),
        Panel(
            "Duration",
            "s",
            {
                f"{name} {{{{grpc_method}}}}": quantile(
                    share,
                    "grpc_server_call_duration_seconds",
                    by="grpc_method",
                    unlike=_STREAMS,
                )
                for name, share in (("median", 0.5), ("99 %", 0.99))
            },
            "Of calls whose duration depends neither on the client nor on the data.",
        ),
        Panel(
            "Errors",
            "reqps",
            {"{{reason}}": rate("storesvc_call_errors_total", by="reason")},
            "Calls that failed, by their reason.",
        ),
        Panel(
            "In flight",
            "none",
            {
                "{{grpc_method}}": "sum by (grpc_method) (storesvc_calls_in_flight"
                f"{{{_SERVERS}}})"
            },
            "Calls in flight: streams and watches last long.",
        ),
        Panel(
            "Wait for a turn",
            "s",
            {
                "{{purpose}}": quantile(
                    0.99, "storesvc_queue_wait_seconds", by="purpose"
                )
            },
            "Wait of the calls that had to wait (99 %).",
        ),
        Panel(
            "Rejected callers",
            "reqps",
            {
                "{{reason}}": rate("storesvc_auth_denied_total", by="reason"),
                "audit failures": rate("storesvc_audit_failures_total"),
            },
            "Calls rejected because of their caller, and failures of the audit log.",
        ),
    ],
    "Storage": [
        Panel(
            "Requests",
            "reqps",
            {
                "{{operation}} {{result}}": rate(
                    "storesvc_storage_request_duration_seconds_count",
                    by="operation, result",
                )
            },
            "Requests to the storage; a conflict is a usual response.",
        ),
        Panel(
            "Duration of requests",
            "s",
            {
                "{{operation}} 99 %": quantile(
                    0.99, "storesvc_storage_request_duration_seconds", by="operation"
                )
            },
            "With their hedges and retries.",
        ),
        Panel(
            "Hedges and retries",
            "reqps",
            {
                "{{operation}} {{kind}}": rate(
                    "storesvc_storage_retries_total", by="operation, kind"
                )
            },
            "Requests that were sent again because they were slow or late.",
        ),
    ],
    "Collection and process": [
        Panel(
            "Deleted objects",
            "cps",
            {"objects": rate("storesvc_gc_deleted_objects_total")},
            "Objects that the garbage collection deletes per second.",
        ),
        Panel(
            "CPU",
            "none",
            {
                "{{instance}}": "sum by (instance) "
                f"(rate(process_cpu_seconds_total{{{_SERVERS}}}{_WINDOW}))"
            },
            "CPU seconds per second.",
        ),
        Panel(
            "Memory",
            "bytes",
            {
                "{{instance}}": "sum by (instance) "
                f"(process_resident_memory_bytes{{{_SERVERS}}})"
            },
            "Resident memory.",
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
                "id": len(panels) + 1,
                "panels": [],
            }
        )
        top, left = top + 1, 0
        for panel in row:
            height = 4 if panel.is_number else 8
            if left + panel.width > 24:
                top, left = top + height, 0
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            panels.append(_panel(panel, place, len(panels) + 1))
            left += panel.width
        top += height
    return {
        "title": "storesvc",
        "uid": "storesvc",
        "description": "Servers of a checkpoint store.",
        "schemaVersion": 39,
        "tags": ["storesvc"],
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "editable": True,
        "graphTooltip": 1,
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                _variable("job", "label_values(storesvc_build_info, job)"),
                _variable(
                    "instance",
                    'label_values(storesvc_build_info{job=~"$job"}, instance)',
                ),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, place: dict[str, int], number: int) -> dict[str, Any]:
    return {
        "type": "stat" if panel.is_number else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": place,
        "id": number,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0},
            "overrides": [],
        },
        "options": {} if panel.is_number else {"tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "expr": expression,
                "legendFormat": legend or "__auto",
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
            }
            for at, (legend, expression) in enumerate(panel.lines.items())
        ],
    }


def text() -> str:
    """Returns the contents of the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("storesvc.json").write_text(text())

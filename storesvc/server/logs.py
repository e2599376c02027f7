"""Configures the log of a server: lines of text, or one JSON object for each record.

Records of a call have its id, as have the audit log, spans, trailers and errors.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from storesvc.auth.call import current
from storesvc.format.names import parse_traceparent, upload_trace
from storesvc.telemetry.events import parse_subject, scope

LogFormat: TypeAlias = Literal["text", "json"]


def log_to_stderr(level: int | str, *, form: LogFormat = "text") -> None:
    """Configures logging to stderr at a level."""
    text = "%(asctime)s %(levelname)s %(name)s:%(call)s %(message)s"
    logging.basicConfig(level=level, format=text)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_CallFilter())
        if form == "json":
            handler.setFormatter(JsonFormatter())


class _CallFilter(logging.Filter):
    """Adds the id of the call that logs to each record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the id; keeps the record."""
        call = current.get()
        record.call = f" [{call.request_id}]" if call is not None else ""
        return True


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    The fields are ``time``, ``level``, ``logger`` and ``message``; in a call also
    ``request_id``, ``method``, ``principal`` and, as far as they are known, ``run``,
    ``step``, ``upload`` and ``trace_id``; after an exception its ``traceback``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        moment = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_call_fields(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _call_fields() -> dict[str, str]:
    """Returns the fields of the call that logs."""
    call, measured = current.get(), scope.get()
    if call is None:
        return {}
    subject = parse_subject(call.subject.get("name", ""))
    fields = {
        "request_id": call.request_id,
        "method": call.method,
        "principal": call.principal.name,
        **subject,
    }
    ids = upload_trace(subject.get("upload", ""))
    if ids is None and measured is not None:
        ids = parse_traceparent(measured.parent)
    if ids is not None:
        fields["trace_id"] = f"{ids.trace:032x}"
    return fields

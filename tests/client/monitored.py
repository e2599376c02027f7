"""Listens to ``jax.monitoring``, in a test and in the processes of a job."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import storesvc_client as store


@dataclass(slots=True)
class Heard:
    """Records the events of ``jax.monitoring`` below some prefixes."""

    prefixes: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    """Names of all events, in their order."""
    values: dict[str, float] = field(default_factory=dict)
    """The last value of each duration and scalar."""
    tags: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last keyword arguments of each event that has some."""

    def receive(self, name: str, *value: float, **tags: Any) -> None:
        """Records an event, if it has one of the prefixes."""
        if name.startswith(self.prefixes):
            self.names.append(name)
            self.values.update((name, one) for one in value)
            if tags:
                self.tags[name] = tags


@contextmanager
def listening(*prefixes: str, also: Iterable[Any] = ()) -> Generator[Heard]:
    """Listens to the events below some prefixes; ``also`` are listeners of events."""
    heard = Heard(prefixes or ("/jax/storesvc/", "/jax/orbax/"))
    monitoring: Any = jax.monitoring  # its listeners have three types, ours has one
    for listener in also:
        monitoring.register_event_listener(listener)
    monitoring.register_event_listener(heard.receive)
    monitoring.register_event_duration_secs_listener(heard.receive)
    monitoring.register_scalar_listener(heard.receive)
    try:
        yield heard
    finally:
        for listener in also:
            monitoring.unregister_event_listener(listener)
        monitoring.unregister_event_listener(heard.receive)
        monitoring.unregister_event_duration_listener(heard.receive)
        monitoring.unregister_scalar_listener(heard.receive)


def saves_and_restores(target: str) -> dict[str, Any]:
    """Saves and restores as one process of a job, and returns what it heard."""
    entries: list[dict[str, object]] = []

    class Logger:
        def log_entry(self, msg: dict[str, object]) -> None:
            entries.append(msg)

    with (
        listening() as heard,
        store.connect(target, orbax_events=True, step_logger=Logger()) as client,
    ):
        run = client.run("tests/job")
        report = run.save(3, {"x": np.arange(1 << 20)}).report()
        run.restore()
    return {
        "names": heard.names,
        "values": heard.values,
        "sent": report.sent_bytes,
        "entries": entries,
    }

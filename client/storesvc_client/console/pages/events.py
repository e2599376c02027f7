"""``/events``: changes of checkpoints as they happen."""

from storesvc_client import DataLossError
from storesvc_client.console.rendering import Page, command
from storesvc_client.console.visit import Visit


def page(visit: Visit) -> Page:
    """Returns the events of a namespace or a run since the console began to watch it;
    the first ones are the newest checkpoints."""
    damaged: list[DataLossError] = []  # the list of runs shows them
    runs = visit.client.runs(on_damage=damaged.append)
    namespaces = sorted({run.name.partition("/")[0] for run in runs})
    parent = visit.query.get("of") or next(iter(namespaces), "")
    feed = visit.feeds.find_feed(parent) if parent else None
    events = feed.after(0) if feed else []
    return Page(
        template="events.html",
        title="Events",
        document=[event for _, event in events],
        command=command("watch", parent or "NAMESPACE", "--since", "latest"),
        section="Events",
        values={
            "parent": parent,
            "namespaces": namespaces,
            "events": [event for _, event in reversed(events)],
            "last": events[-1][0] if events else 0,
            "problem": str(feed.problem or "") if feed else "",
        },
    )

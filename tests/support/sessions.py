"""Clients and runs as tests use them again and again."""

import storesvc_client as store


def send_through_server(of: store.Client | store.Run) -> None:
    """Makes saves and restores send their data through the server, as over a socket."""
    object.__setattr__(of._session, "data_root", None)


def restore_report(run: store.Run) -> store.RestoreReport:
    """Restores the newest checkpoint of a run; returns the report."""
    opened = run.open()
    opened.restore()
    assert opened.report is not None
    return opened.report

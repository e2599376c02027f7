"""Clients whose sessions a test changes."""

import storesvc_client as store


def send_through_server(of: store.Client | store.Run) -> None:
    """Makes saves and restores send their data through the server, as over a socket."""
    object.__setattr__(of._session, "data_root", None)

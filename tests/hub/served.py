"""A hub on a real socket, in a thread of this process."""

from secrets import token_urlsafe

import storesvc_client as store
from storesvc_client._hub.app import create_app
from storesvc_client._hub.callers import TokenHolders
from storesvc_client._hub.snapshots import View
from tests.support.served_app import ServedApp


class ServedHub(ServedApp):
    """Serves the checkpoints of a store while the context lasts."""

    def __init__(self, client: store.Client, view: View | None = None) -> None:
        super().__init__()
        self.token = token_urlsafe(32)
        self.serve(
            create_app(TokenHolders(client, view or View(), token=self.token)),
            headers={"Authorization": f"Bearer {self.token}"},
        )

"""Calls that tell what the server is."""

import storesvc
from storesvc.format import trees
from storesvc.restore import sender
from storesvc.rpc.boundary import MAX_MESSAGE_BYTES, Context
from storesvc.save import batches, leaf_tables
from storesvc.save.table_parts import MAX_TREE_BYTES
from storesvc.store import Store
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api


class InfoCalls:
    """Tells what the server is and allows."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def GetServerInfo(
        self, request: maintenance_api.GetServerInfoRequest, context: Context
    ) -> maintenance_api.GetServerInfoResponse:
        return maintenance_api.GetServerInfoResponse(
            version=storesvc.__version__,
            store_uid=self._store.uid,
            limits=maintenance_api.Limits(
                max_message_bytes=MAX_MESSAGE_BYTES,
                max_frame_bytes=batches.FRAME_BYTES,
                max_chunk_bytes=trees.MAX_CHUNK_BYTES,
                max_leaf_count=leaf_tables.MAX_LEAVES,
                max_chunk_count=leaf_tables.MAX_CHUNKS,
                max_tree_bytes=MAX_TREE_BYTES,
                max_read_chunk_count=sender.MAX_CHUNKS,
            ),
        )

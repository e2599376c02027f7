"""Calls that verify checkpoints."""

from contextlib import aclosing

from storesvc.format.names import CheckpointName
from storesvc.inspect.damage import Damage
from storesvc.inspect.verify_report import Report
from storesvc.rpc import messages
from storesvc.rpc.boundary import Context, refusals, write
from storesvc.store import Store
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api


class VerifyCalls:
    """Verifies checkpoints."""

    _store: Store

    async def VerifyCheckpoint(
        self, request: maintenance_api.VerifyCheckpointRequest, context: Context
    ) -> None:
        async with refusals(context):
            name = CheckpointName.from_resource(request.name)
            record = await self._store.catalogue.checkpoint(name)
            checkpoint = messages.checkpoint_message(name.run, record)
            response = maintenance_api.VerifyCheckpointResponse(checkpoint=checkpoint)
            await write(context, response)
            reports = self._store.verifier.verify(name.run, record)
            async with aclosing(reports):
                async for report in reports:
                    await write(context, report_message(report))


def report_message(report: Report) -> maintenance_api.VerifyCheckpointResponse:
    """Returns a report as the contract shows it."""
    return maintenance_api.VerifyCheckpointResponse(
        chunk_count=report.chunk_count,
        stored_bytes=report.stored_bytes,
        damages=map(damage_message, report.damages),
    )


def damage_message(damage: Damage) -> maintenance_api.Damage:
    """Returns a damage as the contract shows it."""
    return maintenance_api.Damage(
        key=damage.key, index=damage.index, kind=damage.kind, message=damage.message
    )

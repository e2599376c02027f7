"""A forged manifest, and the record with its checksum."""

from collections.abc import Callable

from storesvc.format.checksums import digest
from storesvc_proto.v1 import tree_pb2
from tests.support import stored_records
from tests.support.saved_checkpoint import Saved


def forge_manifest(saved: Saved, change: Callable[[tree_pb2.Manifest], object]) -> None:
    """Changes the manifest of a checkpoint and its checksum in the record."""
    record = saved.record
    old = saved.root / saved.places.manifest(record.upload, record.manifest_digest)
    manifest = tree_pb2.Manifest.FromString(old.read_bytes())
    change(manifest)
    data = manifest.SerializeToString(deterministic=True)
    record.manifest_digest, record.manifest_bytes = digest(data), len(data)
    new = saved.root / saved.places.manifest(record.upload, record.manifest_digest)
    new.write_bytes(data)
    stored_records.write(saved.root, saved.places.checkpoint(record.step), record)

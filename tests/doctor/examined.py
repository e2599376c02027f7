"""Examines the root that is the argument with little effort, and prints JSON."""

import json
import sys
from typing import Final

from storesvc.storage.location import storage_at
from storesvc_client._doctor.doctor import Examination
from storesvc_client._doctor.findings import Diagnosis, Effort

LITTLE: Final = Effort(
    sample_count=150, object_bytes=1 << 16, object_count=8, state_bytes=1 << 20
)


def examine(root: str) -> Diagnosis:
    """Returns the diagnosis of a root."""
    examination = Examination(lambda _: None, LITTLE)
    examination.examine_root(root, storage_at(root))
    return examination.end()


if __name__ == "__main__":
    print(json.dumps(examine(sys.argv[1]).document()))

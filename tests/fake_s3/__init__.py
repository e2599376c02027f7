"""An emulator of the part of S3 that stores use: objects, ranges, conditions, lists.

    with FakeS3(buckets=["b1"]) as s3:
        s3.fault("PUT .*manifest", Status(503), times=2)
        ...  # clients of s3.url, path-style

HTTP, buckets and faults are shared with the emulator of Google Cloud Storage, and are
in ``tests.fake_gcs``. As on S3, an object's generation is its ETag, the MD5 of its
bytes: the same bytes written again have the same generation. Signatures are not
checked; session policies are, with `Keys`.
"""

from tests.fake_s3.emulator import FakeS3
from tests.fake_s3.keys import Keys

__all__ = ["FakeS3", "Keys"]

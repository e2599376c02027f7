"""An emulator of S3, as far as stores speak it: objects, ranges, conditions, lists.

    with FakeS3(buckets=["b1"]) as s3:
        s3.fault("PUT .*manifest", Status(503), times=2)
        ...  # clients of s3.url, path-style

What it shares with that of Google Cloud Storage lies there: the wire, the buckets, the
faults. As on S3 an object's generation is its ETag, the MD5 of its bytes: the same
bytes written again are the same generation. Signatures are not looked at.
"""

from tests.fake_s3.emulator import FakeS3

__all__ = ["FakeS3"]

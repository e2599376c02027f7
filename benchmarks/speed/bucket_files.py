"""An fsspec file system over an emulated bucket.

Peers make directories and write small files next to the arrays with it, as they do with
gcsfs on the real storage.
"""

from io import BytesIO
from typing import Any, ClassVar

from fsspec.spec import AbstractFileSystem
from google.api_core.exceptions import NotFound
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Blob, Client


class BucketFiles(AbstractFileSystem):  # type: ignore[misc]  # it has no types
    """The objects of all buckets; a directory is a prefix, or an empty object whose
    name ends with "/"."""

    protocol = "gcs"
    cachable: ClassVar[bool] = False

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(**options)
        self._client = Client(
            "any", AnonymousCredentials(), client_options={"api_endpoint": url}
        )

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return str(path).removeprefix("gs://").removeprefix("gcs://").rstrip("/")

    def mkdir(self, path: Any, create_parents: bool = True, **_: Any) -> None:
        self._blob(f"{self._strip_protocol(path)}/").upload_from_string(b"")

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        self.mkdir(path)

    def info(self, path: Any, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        bucket, _, key = name.partition("/")
        if not key:
            return {"name": name, "size": 0, "type": "directory"}
        found = self._client.bucket(bucket).get_blob(key)
        if found is not None:
            return {"name": name, "size": found.size, "type": "file"}
        below = self._client.list_blobs(bucket, prefix=f"{key}/", max_results=1)
        if not list(below):
            raise FileNotFoundError(name)
        return {"name": name, "size": 0, "type": "directory"}

    def ls(self, path: Any, detail: bool = True, **_: Any) -> Any:
        bucket, _, key = self._strip_protocol(path).partition("/")
        prefix = f"{key}/" if key else ""
        pages = self._client.list_blobs(bucket, prefix=prefix, delimiter="/")
        found = [
            {"name": f"{bucket}/{blob.name}", "size": blob.size, "type": "file"}
            for blob in pages
            if blob.name != prefix
        ]
        found += [
            {"name": f"{bucket}/{name.rstrip('/')}", "size": 0, "type": "directory"}
            for name in pages.prefixes
        ]
        return found if detail else [one["name"] for one in found]

    def rm(self, path: Any, recursive: bool = False, **_: Any) -> None:
        bucket, _, key = self._strip_protocol(path).partition("/")
        for blob in self._client.list_blobs(bucket, prefix=key):
            if blob.name == key or blob.name.startswith(f"{key}/"):
                blob.delete()

    def _open(self, path: Any, mode: str = "rb", **_: Any) -> Any:
        blob = self._blob(self._strip_protocol(path))
        if mode != "rb":
            return _NewFile(blob)
        try:
            return BytesIO(blob.download_as_bytes())
        except NotFound as e:
            raise FileNotFoundError(path) from e

    def _blob(self, name: str) -> Blob:
        bucket, _, key = name.partition("/")
        return self._client.bucket(bucket).blob(key)


class _NewFile(BytesIO):
    """A file that is stored when it is closed."""

    def __init__(self, blob: Blob) -> None:
        super().__init__()
        self._blob = blob

    def close(self) -> None:
        if not self.closed:
            self._blob.upload_from_string(self.getvalue())
        super().close()

"""Web servers of folders, on loopback."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves a folder and logs nothing."""

    def log_message(self, *args: object) -> None:
        """Logs nothing."""


class RangeHandler(QuietHandler):
    """Serves a folder, and ranges of its files."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body after its headers would wait 40 ms

    def do_GET(self) -> None:
        """Sends a file, a range of one, or a list."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        file = Path(self.translate_path(self.path))
        if found is None or not file.is_file():
            super().do_GET()
            return
        start, stop, data = int(found[1]), int(found[2]) + 1, file.read_bytes()
        part = data[start:stop]
        self.send_response(206)
        end = start + len(part) - 1
        self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


class RedirectHandler(RangeHandler):
    """Serves a folder, but the data files of a database from elsewhere."""

    def do_GET(self) -> None:
        """Sends a file, a list, or another address."""
        if "/d/" not in self.path:
            super().do_GET()
            return
        self.send_response(302)
        self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serving(folder: Path, handler: type[SimpleHTTPRequestHandler]) -> Iterator[str]:
    """Yields the URL of a folder while a server runs."""
    serve = partial(handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()

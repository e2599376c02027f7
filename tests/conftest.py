"""Fixtures: real server processes over fresh file stores, and clients of them."""

import asyncio
import gc
import inspect
import itertools
import os
import random
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# before anything imports jax: eight devices to spread arrays over
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
# what was compiled once is not compiled again: by another worker, or in another run
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# before anything imports NumPy: threads of OpenBLAS spin for work that no test has
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# before anything imports Keras, which else reads and writes files of the user
os.environ["KERAS_BACKEND"] = "jax"
os.environ["KERAS_HOME"] = str(Path(__file__).parents[1] / "build" / "keras")
# no test reads the contexts of the user
os.environ["STORESVC_CONFIG"] = str(Path(__file__).parents[1] / "build" / "no-config")
if os.environ.get("STORESVC_SUITE") != "full":
    # what runs once is compiled soon rather than well
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import grpc
import pytest
from hypothesis import settings

import storesvc_client as store
from storesvc.format.names import RunName
from storesvc.storage import requests
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.fake_gcs import FakeGcs
from tests.fake_s3 import FakeS3
from tests.support.contract import Writer
from tests.support.examples import FULL, examples
from tests.support.gcs_calls import BUCKET
from tests.support.in_process_server import InProcessServer
from tests.support.saved_checkpoint import CHUNKS, Saved
from tests.support.server_process import ServerProcess

# No test is a matter of time: machines are shared. Explicit counts of examples go
# through examples() too.
settings.register_profile("quick", deadline=None, max_examples=examples(100))
settings.register_profile("full", deadline=None)
settings.load_profile("full" if FULL else "quick")

_MEMORY_BYTES: Final = 8 << 30
"""Without as many free bytes, ``/dev/shm`` is not used."""

# It has an environment of its own: make test-easydel.
collect_ignore = [] if find_spec("easydel") else ["easydel"]


def pytest_collection_finish() -> None:
    """Keeps the modules and the collected tests out of the garbage collections to come,
    and makes these rarer: they take a tenth of the suite's time otherwise."""
    gc.freeze()
    gc.set_threshold(50_000, 5, 5)  # memory grows with fewer full ones


def _use_memory_for_files(config: pytest.Config) -> None:
    """Keeps temporary files in memory until the tests end, unless TMPDIR names a place:
    stores sync each file, which takes a fifth of the suite's time on a disk."""
    memory = Path("/dev/shm")
    if "TMPDIR" in os.environ or not memory.is_dir():
        return
    # tests run scripts that they write
    is_executable = not os.statvfs(memory).f_flag & os.ST_NOEXEC
    if is_executable and shutil.disk_usage(memory).free > _MEMORY_BYTES:
        directory = tempfile.mkdtemp(prefix="store-", dir=memory)
        Path(directory).chmod(0o711)  # tests run programs below it as other users
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
        os.environ["TMPDIR"] = directory  # of the workers too
        tempfile.tempdir = None  # it may have been asked for before


@pytest.hookimpl(tryfirst=True)  # before Hypothesis looks at it
def pytest_configure(config: pytest.Config) -> None:
    """Draws the seed of all that Hypothesis draws, unless it is given; hears SIGINT and
    SIGHUP where a shell lets jobs in the background, or nohup, ignore them, and so
    would their children; chooses the place of temporary files."""
    _use_memory_for_files(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().getrandbits(32))


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine in an event loop of its own, in which fixtures
    that return coroutines are awaited first."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        taken = inspect.signature(pyfuncitem.obj).parameters
        given = {name: pyfuncitem.funcargs[name] for name in taken}
        for name, value in given.items():
            if inspect.iscoroutine(value):
                given[name] = await value
        await pyfuncitem.obj(**given)

    asyncio.run(run())
    return True


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints the seed."""
    seed = config.option.hypothesis_seed
    terminalreporter.write_line(f"again with what was drawn: --hypothesis-seed={seed}")


@pytest.fixture(scope="session")
def fresh_servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[], ServerProcess]]:
    """Brings servers, each over a root of its own: to start one takes half a second,
    so the next one does it aside."""
    spares: list[ServerProcess] = []

    def launch() -> None:
        directory = tmp_path_factory.mktemp("server")
        spares.append(ServerProcess(directory / "store", directory))
        spares[-1].launch()

    def bring() -> ServerProcess:
        spare = spares.pop()
        try:
            spare.await_ready()
        finally:
            launch()
        return spare

    launch()
    yield bring
    spares.pop().kill()


@pytest.fixture
def start_server(
    tmp_path: Path, fresh_servers: Callable[[], ServerProcess]
) -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server over a fresh root, or over one that is given."""
    fresh: list[ServerProcess] = []
    started: list[ServerProcess] = []

    def start(*arguments: str, root: Path | None = None) -> ServerProcess:
        if not arguments and root is None:
            fresh.append(fresh_servers())
            return fresh[-1]
        directory = tmp_path / f"server-{len(started)}"
        directory.mkdir()
        server = ServerProcess(root or tmp_path / "store", directory, *arguments)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.kill()
    for server in fresh:
        _end(server)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., InProcessServer]]:
    """Serves a fresh root, or one that is given, in this process."""
    with ExitStack() as servers:

        def start(root: Path | None = None) -> InProcessServer:
            server = InProcessServer(root or tmp_path / "served")
            servers.callback(server.close)
            return server

        yield start


GIVEN_BUCKET = os.environ.get("STORESVC_TEST_BUCKET", "").rstrip("/")
"""The root below which ``make test-gcs`` has us work in a real bucket; empty: we
emulate one."""

_BELOW = (
    f"{GIVEN_BUCKET}/{uuid.uuid4().hex}" if GIVEN_BUCKET else f"gs://{BUCKET}/roots"
)
_roots = itertools.count()


def gcs_root() -> str:
    """Returns the root of a store that no other test uses, in a bucket."""
    return f"{_BELOW}/{next(_roots)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need an emulator if a real bucket is given."""
    if GIVEN_BUCKET:
        skip = pytest.mark.skip(reason="needs the emulator's faults and its log")
        for item in items:
            if item.get_closest_marker("emulated"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def open_windows() -> None:
    """Has each test begin with buckets that have rejected nothing yet: the emulator is
    the same for all."""
    requests._windows.clear()


@pytest.fixture(scope="session")
def gcs() -> Iterator[FakeGcs]:
    """An emulator that the whole suite shares; TensorStore uses it, here and in the
    processes that a test starts. For tests that are marked ``emulated``."""
    assert not GIVEN_BUCKET, "mark the test as emulated"
    patch = pytest.MonkeyPatch()
    with FakeGcs(buckets=[BUCKET]) as emulator:
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", emulator.url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
        yield emulator
    patch.undo()


@pytest.fixture(scope="session")
def bucket_storage(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has ``gcs_root`` lead to a storage: the emulator, or the bucket that is given, in
    which nothing is left."""
    if not GIVEN_BUCKET:
        request.getfixturevalue("gcs")
        yield
        return

    async def empty() -> None:
        await (await TensorStoreBucket.open(_BELOW)).delete_below("")

    yield
    asyncio.run(empty())


@pytest.fixture(scope="session")
def s3() -> Iterator[FakeS3]:
    """An S3 that the whole suite shares, and credentials of it, also for the processes
    that a test starts."""
    patch = pytest.MonkeyPatch()
    with FakeS3(buckets=[BUCKET]) as emulator:
        patch.setenv("AWS_ACCESS_KEY_ID", "any")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield emulator
    patch.undo()


def s3_root(s3: FakeS3) -> str:
    """Returns the root of a store that no other test uses, in that storage."""
    options = f"endpoint={s3.url}&region=us-east-1"
    return f"s3://{BUCKET}/roots/{next(_roots)}?{options}"


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess | InProcessServer]:
    """A server that the tests of a module share: a process of its own in the full
    suite, a server in this process, which starts in milliseconds, in the quick one."""
    if FULL:
        process: ServerProcess = request.getfixturevalue("fresh_servers")()
        yield process
        _end(process)
        return
    served = InProcessServer(tmp_path_factory.mktemp("served") / "store")
    yield served
    served.close()
    shutil.rmtree(served.root, ignore_errors=True)


def _end(server: ServerProcess) -> None:
    """Kills a server and deletes its store: pytest keeps the directory until the last
    test, and all stores together take 9 GB."""
    server.kill()
    shutil.rmtree(server.root, ignore_errors=True)  # clients may still write to it


@pytest.fixture(scope="module")
def server_address(server: ServerProcess | InProcessServer) -> str:
    """Its ``HOST:PORT``."""
    return server.address


@pytest.fixture
def stub(server_address: str) -> CheckpointServiceStub:
    """A stub of the server's service of checkpoints."""
    return CheckpointServiceStub(grpc.insecure_channel(server_address))


@pytest.fixture
def client(server_address: str) -> Iterator[store.Client]:
    """A client of it."""
    with store.connect(server_address) as connected:
        yield connected


_runs = itertools.count()


@pytest.fixture
def run(client: store.Client) -> store.Run:
    """A run that no other test uses."""
    return client.run(f"tests/run-{next(_runs)}")


@pytest.fixture
def saved(server: ServerProcess | InProcessServer, run: store.Run) -> Saved:
    """A checkpoint of one leaf of several chunks."""
    Writer(server.address, run.name, 3, chunks=CHUNKS).save(range(CHUNKS))
    return Saved(server.root, RunName.parse(run.name))

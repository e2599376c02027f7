"""Scripts that end while saves run lose nothing in silence; forked children end."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import Final

import pytest

import storesvc_client as store
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow

_BEGIN = """
import atexit, multiprocessing, os, signal, sys, threading, time
import numpy as np
import storesvc_client as store

url = sys.argv[1]
state = {"x": np.zeros(1 << 20)}
"""


def _command(script: str, url: object, *, dev: bool = False) -> list[str]:
    flags = ["-X", "dev", "-W", "error::ResourceWarning"] if dev else []
    flags += ["-W", "ignore:This process:DeprecationWarning"]  # of forks
    return [sys.executable, *flags, "-c", _BEGIN + script, str(url)]


_ABORT: Final = re.compile(
    r"^(F\d+ .* ev_epoll1_linux\.cc:\d+\] |\*{3} Check failure stack trace: )"
)
"""Lines of a forked child that gRPC's own handler of forks has aborted; it may also
crash there."""


def _end(script: str, url: object, **options: bool) -> tuple[int, str, str]:
    """Runs a script to its end; returns its exit code and what it printed."""
    ended = subprocess.run(
        _command(script, url, **options),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"GRPC_VERBOSITY": "ERROR"},
    )
    said = ended.stderr.splitlines(keepends=True)
    said = [line for line in said if not _ABORT.search(line)]
    if options:  # -X dev: asyncio logs slow steps
        said = [line for line in said if not line.startswith("Executing <")]
    return ended.returncode, ended.stdout, "".join(said)


def _steps(url: str, run: str = "a/b") -> list[int]:
    with store.connect(url) as client:
        return sorted(client.run(run).steps())


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Root of a store."""
    return f"file://{tmp_path}/store"


ENDS = {
    "last line": """
run = store.connect(url).run("a/b")
run.save(1, state)
""",
    "client kept": """
client = store.connect(url)
client.run("a/b").save(1, state)
""",
    "client dropped by a function": """
def save():
    store.connect(url).run("a/b").save(1, state)
save()
""",
    "queued saves": """
def save():
    run = store.connect(url).run("a/b")
    for step in range(5):
        run.save(step, {"x": np.full(1 << 18, step)}, if_busy="queue")
save()
""",
    "several clients": """
def save(number):
    store.connect(url).run(f"a/b{number}").save(1, state)
for number in range(3):
    save(number)
""",
    "thread that outlives the main one": """
run = store.connect(url).run("a/b")
def train():
    time.sleep(0.5)
    for step in range(4):
        run.save(step, {"x": np.full(1 << 18, step)})
    assert run.restore().keys() == {"x"}
threading.Thread(target=train).start()
""",
    "thread that connects after the main one": """
connect = store.connect
def train():
    threading.main_thread().join()
    run = connect(url).run("a/b")
    for step in range(4):
        run.save(step, {"x": np.full(1 << 18, step)})
threading.Thread(target=train).start()
""",
    "daemon thread": """
begun = threading.Event()
def train():
    store.connect(url).run("a/b").save(1, state)
    begun.set()
    time.sleep(60)
threading.Thread(target=train, daemon=True).start()
begun.wait()
""",
    "loop in a thread": """
import logging
logging.disable()
run = store.connect(url).run("a/b")
def train():
    time.sleep(0.5)
    with run.loop(every=store.Steps(2), create=True) as loop:
        start_state, start = loop.restore_or({"x": np.zeros(8)})
        for step in loop.steps(start, 6):
            loop.after(step, {"x": np.full(8, float(step))})
threading.Thread(target=train).start()
""",
    "sys.exit": """
store.connect(url).run("a/b").save(1, state)
sys.exit()
""",
    "snapshot on the device": """
import jax.numpy as jnp
store.connect(url).run("a/b").save(1, {"x": jnp.ones(1 << 20)}, snapshot="device")
""",
    "saves through the server": """
from tests.support.sessions import send_through_server
client = store.connect(url)
send_through_server(client)
client.run("a/b").save(1, state)
""",
    "spawned child": """
def save():
    store.connect(url).run("a/b").save(1, state)
code = '''
import storesvc_client as store, numpy as np
def save(url):
    store.connect(url).run("a/b").save(1, {"x": np.zeros(1 << 20)})
'''
import tempfile, pathlib
folder = tempfile.mkdtemp()
pathlib.Path(folder, "saving_module.py").write_text(code)
sys.path.insert(0, folder)
import saving_module
child = multiprocessing.get_context("spawn").Process(
    target=saving_module.save, args=[url])
child.start()
child.join()
assert child.exitcode == 0
""",
    "forked child that connects": """
def save():
    store.connect(url).run("a/b").save(1, state)
child = multiprocessing.get_context("fork").Process(target=save)
child.start()
child.join()
assert child.exitcode == 0
""",
}
"""Scripts whose saves are all there after their end."""


def _first_rows_for_orbax() -> str:
    """Returns the replacements of the first two rows of the table for Orbax."""
    rows = Path(__file__).parents[2].joinpath("docs/coming-from-orbax.md").read_text()
    table = rows.partition("|---|---|\n")[2].splitlines()
    code = [row.split("| `")[2].partition("`")[0] for row in table[:2]]
    return "\n".join(code)


_EXPECTED = {
    "queued saves": [0, 1, 2, 3, 4],
    "thread that outlives the main one": [0, 1, 2, 3],
    "thread that connects after the main one": [0, 1, 2, 3],
    "loop in a thread": [0, 2, 4, 5],
}


@pytest.mark.parametrize("how", ["last line", "client dropped by a function"])
def test_a_script_that_ends_leaves_nothing_open(url: str, how: str) -> None:
    assert (0, "", "") == _end(ENDS[how], url, dev=True)


@pytest.mark.parametrize("how", ENDS)
def test_a_script_that_ends_has_saved_what_it_began(url: str, how: str) -> None:
    code, printed, said = _end(ENDS[how], url)
    assert (0, "") == (code, printed)
    assert (said == "") is (how != "loop in a thread")  # the loop says where it starts
    assert "storesvc_client: " not in said

    if how == "several clients":
        assert [[1]] * 3 == [_steps(url, f"a/b{number}") for number in range(3)]
    else:
        assert _EXPECTED.get(how, [1]) == _steps(url)


def test_a_save_of_an_exit_handler_is_rejected_and_makes_the_exit_code_1(
    url: str,
) -> None:
    script = """
run = store.connect(url).run("a/b")
@atexit.register
def save():
    run.save(2, state)
run.save(1, state)
"""
    code, _, said = _end(script, url)

    assert (1, [1]) == (code, _steps(url))
    assert "InvalidRequestError: save of a/b@2: expected a save before the" in said


def test_transfers_in_a_thread_that_outlives_the_main_one_end(url: str) -> None:
    script = """
client = store.connect(url)
run = client.run("a/b")
run.save(1, state).result()
other = store.connect(f"{url}-other")
def work():
    time.sleep(0.5)
    run.copy_to(other.run("c/copied"))
    run.export(1, f"safetensors:{url}-exported")
    other.run("c/imported").import_from(f"safetensors:{url}-exported")
threading.Thread(target=work).start()
"""
    assert (0, "", "") == _end(script, url, dev=True)
    assert [1] == _steps(f"{url}-other", "c/copied")
    assert 1 == len(_steps(f"{url}-other", "c/imported"))


@pytest.mark.parametrize("how", ["last line", "thread that outlives the main one"])
def test_saves_to_a_server_are_done_at_the_exit(
    start_server: Callable[..., ServerProcess], how: str
) -> None:
    server = start_server()
    root = server.root.as_uri()
    for number, connect in enumerate(("(url)", f"(url, direct={root!r})")):
        script = ENDS[how].replace("connect(url)", f"connect{connect}")
        script = script.replace("a/b", f"a/b{number}")
        assert (0, "", "") == _end(script, server.address)
        assert _EXPECTED.get(how, [1]) == _steps(server.address, f"a/b{number}")


def test_a_joint_save_is_done_at_the_exit_of_its_processes(url: str) -> None:
    script = """
import jax
address, index = sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(address, num_processes=2, process_id=index)
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((2,), ("x",))
sharding = NamedSharding(mesh, PartitionSpec("x"))
x = jax.make_array_from_callback((1 << 20,), sharding, lambda at: np.ones(1 << 19))
store.connect(url).run("a/b").save(1, {"x": x})
"""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "127.0.0.1:{1}".format(*free.getsockname())
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    job = [
        subprocess.Popen([*_command(script, url), address, str(index)], env=environment)
        for index in range(2)
    ]
    assert [0, 0] == [process.wait(120) for process in job]
    assert [1] == _steps(url)


def test_the_first_rows_for_users_of_orbax_are_a_script(url: str) -> None:
    code = _first_rows_for_orbax().replace("file:///ckpts", url)
    assert code.startswith("run = store.connect(")
    assert (0, "", "") == _end(f"step = 7\n{code}", url)
    assert [7] == _steps(url, "prod/llama-8b")


_BREAK = """
import logging, pathlib
from storesvc_client._rpc import retry
logging.disable()
retry.PATIENCE_SECONDS = 1
client = store.connect(url)
run = client.run("a/b")
run.save(1, state).result()
pool = next(pathlib.Path(url.removeprefix("file://")).rglob("pool"))
pool.rename(pool.with_name("kept"))
pool.write_bytes(b"")  # nothing can be put below it
"""

FAILS = {
    "last line": "run.save(2, {'x': np.ones(9)})",
    "all is dropped": "run.save(2, {'x': np.ones(9)}); del run, client",
    "success is claimed": "run.save(2, {'x': np.ones(9)}); sys.exit(0)",
    "thread": """
def train():
    time.sleep(0.3)
    run.save(2, {'x': np.ones(9)})
threading.Thread(target=train).start()
""",
    "loop that was left": """
loop = run.loop(every=store.Steps(1), create=True).__enter__()
loop.after(2, {'x': np.ones(9)})
""",
}
"""Last lines of scripts whose save fails."""


@pytest.mark.parametrize("how", FAILS)
def test_a_save_that_fails_unseen_is_reported_and_makes_the_exit_code_1(
    url: str, how: str
) -> None:
    code, printed, said = _end(_BREAK + FAILS[how], url)

    assert (1, "") == (code, printed)
    assert 1 == said.count("storesvc_client: the save of a/b@2 failed: ")
    # A slow machine may wait for so long that the wait is said, too.
    lines = said.splitlines(keepends=True)
    assert 1 == len([line for line in lines if "the exit waits for" not in line])


def test_an_error_that_was_seen_is_not_reported_again(url: str) -> None:
    script = """
try:
    run.save(2, {'x': np.ones(9)}).result()
except store.StoreError:
    pass
assert run.save(3, {'x': np.ones(9)}).exception() is not None
run.save(4, {'x': np.ones(9)})
try:
    client.close()
except store.StoreError:
    pass
"""
    assert (0, "", "") == _end(_BREAK + script, url)


def test_an_error_that_save_itself_raised_is_not_reported_again(url: str) -> None:
    script = """
from storesvc_client._pytree.save_plan import TreeSource
copy = TreeSource.copy
def fail(self, ordinal, into):
    raise MemoryError("no room")
TreeSource.copy = fail
run = store.connect(url).run("a/b")
try:
    run.save(1, state)
except MemoryError:
    TreeSource.copy = copy
run.save(1, state)
"""
    assert (0, "", "") == _end(script, url)
    with store.connect(url) as client:
        assert [1] == client.run("a/b").steps()


def test_a_script_that_raises_saves_what_it_began(url: str) -> None:
    script = """
store.connect(url).run("a/b").save(1, state)
raise SystemError("a bug")
"""
    code, _, said = _end(script, url)

    assert (1, [1]) == (code, _steps(url))
    assert said.endswith("\nSystemError: a bug\n")


def test_the_exit_code_of_a_forked_worker_shows_a_lost_save(url: str) -> None:
    script = f"""
def work():
    print("printed", end="", flush=True)
    exec({_BREAK + FAILS["last line"]!r}, globals())
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
print(child.exitcode)
"""
    code, printed, said = _end(script, url)

    assert (0, "printed1\n") == (code, printed)
    assert "storesvc_client: the save of a/b@2 failed: " in said


def test_the_exit_says_what_it_waits_for_and_ctrl_c_abandons_it(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    script = f"""
import logging
logging.disable()
run = store.connect(url).run("a/b")
os.kill({server.pid}, signal.SIGSTOP)
run.save(1, state)
"""
    with subprocess.Popen(
        _command(script, server.address), stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        waits = child.stderr.readline()
        child.send_signal(signal.SIGINT)
        abandons = child.stderr.read()

    assert (
        "storesvc_client: the exit waits for the save of a/b@1; Ctrl-C abandons it\n"
        == waits
    )
    assert (
        "storesvc_client: the save of a/b@1 was abandoned; a save of the same step "
        "resumes it\n"
    ) == abandons
    assert 1 == child.returncode


def test_a_server_that_is_gone_at_the_exit_is_reported(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    script = f"""
import logging
from storesvc_client._rpc import retry
logging.disable()
retry.PATIENCE_SECONDS = 4
run = store.connect(url).run("a/b")
os.kill({server.pid}, signal.SIGKILL)
run.save(1, state)
"""
    code, _, said = _end(script, server.address)

    assert 1 == code
    first, second = said.splitlines()
    assert "storesvc_client: the exit waits for the save of a/b@1; " in first
    assert "storesvc_client: the save of a/b@1 failed: " in second


USES = {
    "save": "run.save(2, state)",
    "restore": "run.restore()",
    "list": "run.steps()",
    "leaf": "opened.restore()",
    "watch": "next(run.watch())",
    "collect": "list(client.collect())",
    "export": "run.export(1, 'safetensors:/nowhere/out')",
}
"""Calls that a forked child may try."""

_FORKS = """
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join(30)
assert child.exitcode == 0, child.exitcode
"""


@pytest.mark.parametrize("served", [False, True], ids=["embedded", "server"])
def test_a_forked_child_uses_no_client_of_its_parent(
    url: str, served: bool, start_server: Callable[..., ServerProcess]
) -> None:
    script = f"""
client = store.connect(url)
run = client.run("a/b")
run.save(1, state).result()
opened = run.open(1)
def work():
    for use in {[*USES.values()]}:
        try:
            exec(use, globals())
        except store.InvalidRequestError as e:
            assert "multiprocessing.get_context('spawn')" in str(e), (use, e)
        else:
            print("not rejected:", use)
    client.close()
    with client:
        pass
{_FORKS}
print(run.save(3, state).result().step)
"""
    address = start_server().address if served else url
    assert (0, "3\n", "") == _end(script, address)


FORKS = {
    "Process": "def work(): pass" + _FORKS,
    "Pool": """
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
    pool.close()
    pool.join()
""",
    "os.fork and sys.exit": """
child = os.fork()
if not child:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
""",
    "os.fork in a block of the client": """
child = 0
with client:
    child = os.fork()
    if not child:
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    run.save(2, state)
client = store.connect(url)
run = client.run("a/b")
""",
    "workers while saves run": """
for step in range(2, 8):
    run.save(step, {"x": np.full(1 << 20, step)}, if_busy="queue")
    child = multiprocessing.get_context("fork").Process(target=abs, args=[1])
    child.start()
    child.join()
    assert child.exitcode in (0, -6, -11), child.exitcode  # see _ABORT
""",
}
"""Ways to fork children that do not use the client."""


@pytest.mark.parametrize("served", [False, True], ids=["embedded", "server"])
@pytest.mark.parametrize("how", FORKS)
def test_forked_children_end_and_leave_the_client_of_their_parent_alone(
    url: str, how: str, served: bool, start_server: Callable[..., ServerProcess]
) -> None:
    script = f"""
client = store.connect(url)
run = client.run("a/b")
run.save(1, state).result()
{FORKS[how]}
print(run.save(9, state).result().step)
assert [c.step for c in client.run("a/b").checkpoints()][0] == 9
"""
    address = start_server().address if served else url
    assert (0, "9\n", "") == _end(script, address)


def test_a_forked_child_of_a_process_with_a_store_opens_none(url: str) -> None:
    script = f"""
client = store.connect(url)
def work():
    try:
        store.connect(url)
    except store.InvalidRequestError as e:
        assert "multiprocessing.get_context('spawn')" in str(e)
    else:
        sys.exit("not rejected")
{_FORKS}
"""
    assert (0, "", "") == _end(script, url)

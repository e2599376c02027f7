"""Rehearses the restore of a save, so that problems appear before a crash, not after.

A rehearsal does what ``restore_state`` or ``restore_model`` will do in a new process
with the checkpoint's document: it builds the model abstractly by its class from the
stored config, compares the structures, and matches each leaf. It creates and reads no
array.

If the restore would be rejected, a warning in the log shows the call that works. Each
structure is rehearsed once, because a training run saves one structure many times.
"""

import atexit
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakKeyDictionary

import jax

from storesvc_client._api.run import Run, get_parts
from storesvc_client._chunks.memory import collector_paused
from storesvc_client._pytree.save_plan import Plan
from storesvc_client._rpc.connection import Connection
from storesvc_client._save.saver import PendingSave
from storesvc_client._telemetry.reports import Rehearsal
from storesvc_client._values.models import LeafInfo
from storesvc_client._values.options import Rehearse
from storesvc_client.errors import MismatchError
from storesvc_client.trees.nnx.graphs import HasGraph, added_fields, module_class
from storesvc_client.trees.nnx.recipes import (
    Recipe,
    factory_text,
    needed_arguments,
    takes_config,
)
from storesvc_client.trees.nnx.restore_plans import (
    Options,
    Request,
    Stored,
    StoredLeaves,
    plan_module,
    plan_state,
)

__all__ = ["Rehearser"]

_EXIT_SECONDS: Final = 10.0
"""Maximum seconds that the exit of the process waits for rehearsals."""

_log = logging.getLogger("storesvc_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelToSave:
    """A state or module to rehearse, without its arrays."""

    graphdef: Any
    tx: Any
    has_opt_state: bool
    state_class: Any
    """Class of the state; None for a module."""

    @collector_paused()
    def model(self, plan: Plan, *, is_whole: bool) -> Any:
        """Returns the saved model, abstract, from the plan of its save, as a factory
        makes it; if it is whole, with the fields that the class of the state adds.

        Its leaves have no shardings, because a restoring process has other devices.
        """
        leaves = [
            kind() if dtype is None else jax.ShapeDtypeStruct(shape, dtype)
            for kind, shape, dtype, _ in plan.forms
        ]
        tree = jax.tree.unflatten(plan.treedef, leaves)
        part_of = tree.get if isinstance(tree, dict) else partial(getattr, tree)
        added = added_fields(self.state_class) if is_whole else []
        names = ("graphstate", "graphother", *added)
        parts = {name: part_of(name) for name in names}
        return SimpleNamespace(graphdef=self.graphdef, **parts)


class Rehearser:
    """Rehearses the restore of one save, before or after it."""

    def __init__(
        self, run: Run, saved: HasGraph, *, rehearse: Rehearse, is_state: bool
    ) -> None:
        connection = get_parts(run).stub.connection
        self._cache = _caches.setdefault(connection, _RehearsalCache())
        self._run = run.name
        self._saved = _ModelToSave(
            graphdef=saved.graphdef,
            tx=getattr(saved, "tx", None) if is_state else None,
            has_opt_state=getattr(saved, "opt_state", None) is not None,
            state_class=type(saved) if is_state else None,
        )
        self._is_strict = rehearse == "strict"
        self._plan: Plan | None = None

    def check(self, plan: Plan) -> None:
        """Receives the plan of the save; with "strict", rehearses it."""
        self._plan = plan
        if not self._is_strict:
            return
        found = self._cache.result(self._run, plan)
        if found is None:
            found = self._rehearse(plan)
            self._cache.add(self._run, plan, found)
        if not found.ok:
            raise MismatchError(f"save to {self._run}: {found.message}")

    def after(self, save: PendingSave) -> "Future[Rehearsal] | None":
        """Starts a rehearsal in the background, after a save, if its structure is new.

        Returns:
            Future of the result; None if another process of the job rehearses, or if
            ``check`` was not called.
        """
        plan = self._plan
        if plan is None or jax.process_index() != 0:
            return None
        future, is_new = self._cache.begin(self._run, plan)
        if is_new:

            def rehearse() -> None:
                # A training loop may wait for this save, too; unlike save.exception(),
                # this leaves the error to it.
                save.wait()
                found = self._rehearse(plan)
                if not found.ok:
                    _log.warning("%s: %s", self._run, found.message)
                future.set_result(found)

            _start_thread(rehearse, future)
        return future

    def _rehearse(self, plan: Plan) -> Rehearsal:
        """Rehearses the restore by the class of the model; then, if the class needs a
        factory or fails, with the saved model itself."""
        tree, saved = plan.tree, self._saved
        with collector_paused():
            rows = zip(tree.leaves, tree.grids, strict=True)
            leaves = {leaf.key: LeafInfo.from_row(leaf, grid) for leaf, grid in rows}
        stored = StoredLeaves(self._run, tree.structure, leaves, tree)
        call = "restore_state" if saved.state_class else "restore_model"
        unfit = f"the checkpoint cannot be restored by {call}(run, model=...)"
        cls = module_class(saved.graphdef)
        takes_factory = cls is None or _needs_arguments(cls, stored)
        by_class = None
        if cls is not None and not takes_factory:
            by_class = _failure(stored, saved, cls)
            if by_class is None:
                return Rehearsal(ok=True, message="")
        failure = _failure(stored, saved, saved.model(plan, is_whole=False))
        if failure is None and takes_factory:
            return Rehearsal(ok=True, message="")
        if failure is None and cls is not None:
            message = (
                f"the checkpoint cannot be restored by its class, {call}(run, "
                f"model={cls.__name__}): {by_class}; restore it with {call}(run, "
                f"model={factory_text(cls)}), with the arguments and the later changes "
                "(adapters, quantization) that it was made with"
            )
            return Rehearsal(ok=False, message=message)
        if saved.state_class and added_fields(saved.state_class):
            whole = saved.model(plan, is_whole=True)
            if _failure(stored, saved, whole) is None:
                message = (
                    f"{unfit} with a class or a factory: {failure}; restore it with "
                    f"{call}(run, model=state), with a state that was created as this "
                    "one was"
                )
                return Rehearsal(ok=False, message=message)
        message = (
            f"{unfit}: {failure}; restore it as dicts and lists, with {call}(run), or "
            "with run.restore(like=) and a tree of the same structure"
        )
        return Rehearsal(ok=False, message=message)


@collector_paused()  # the recipe is gone before the collector runs again
def _needs_arguments(cls: type[Any], stored: Stored) -> bool:
    """Returns whether a checkpoint lacks arguments that a class needs."""
    recipe = Recipe.unpack(stored.document)
    has_config = recipe.config is not None and takes_config(cls, recipe)
    given = {"rngs", "config"} if has_config else {"rngs"}
    return not given.issuperset(needed_arguments(cls))


def _failure(stored: Stored, saved: _ModelToSave, model: Any) -> Exception | None:
    """Returns the error that a restore with this model would raise, or None."""
    # without tx, the optimizer is unknown
    skips = saved.state_class is not None and saved.tx is None
    options = Options(opt_state="skip") if skips else Options()
    request = Request(
        model=model,
        tx=saved.tx if saved.has_opt_state else None,
        state_class=saved.state_class,
        options=options,
    )
    plan = plan_module if saved.state_class is None else plan_state
    try:
        plan(stored, request).check(stored)
    except Exception as e:  # noqa: BLE001 - the caller's own code runs, too
        return e
    return None


class _RehearsalCache:
    """Cache of the rehearsals of one store, by structure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, tuple[Plan, Future[Rehearsal]]] = {}
        self._found: dict[tuple[str, bytes], Future[Rehearsal]] = {}

    def begin(self, run: str, plan: Plan) -> "tuple[Future[Rehearsal], bool]":
        """Returns the rehearsal of a plan, and whether the caller must run it."""
        with self._lock:
            last = self._last.get(run)
            if last is not None and last[0] is plan:  # the next save of a loop
                return last[1], False
            mine: Future[Rehearsal] = Future()
            future = self._found.setdefault((run, _digest(plan)), mine)
            self._last[run] = plan, future
            return future, future is mine

    def result(self, run: str, plan: Plan) -> Rehearsal | None:
        """Returns the result of a plan's rehearsal, or None if it has not finished."""
        with self._lock:
            last = self._last.get(run)
            if last is not None and last[0] is plan:
                future: Future[Rehearsal] | None = last[1]
            else:
                future = self._found.get((run, _digest(plan)))
        return future.result() if future is not None and future.done() else None

    def add(self, run: str, plan: Plan, found: Rehearsal) -> None:
        ended: Future[Rehearsal] = Future()
        ended.set_result(found)
        with self._lock:
            known = self._found.setdefault((run, _digest(plan)), ended)
            self._last[run] = plan, known


_caches: "WeakKeyDictionary[Connection, _RehearsalCache]" = WeakKeyDictionary()


def _digest(plan: Plan) -> bytes:
    """Returns a digest of a plan's structure and leaves, without shardings."""
    digest = hashlib.sha256(plan.tree.structure)
    # Leaves of a tree ascend by key, so equal structures have equal digests.
    for leaf in plan.tree.leaves:
        digest.update(f"{leaf.key}\0{leaf.dtype}{leaf.shape}".encode())
    return digest.digest()


_threads: dict[threading.Thread, "Future[Rehearsal]"] = {}
os.register_at_fork(after_in_child=_threads.clear)


def _start_thread(work: Callable[[], None], future: "Future[Rehearsal]") -> None:
    """Runs work in a daemon thread, so that a class that hangs cannot block exit."""

    def run() -> None:
        try:
            work()
        except Exception as e:  # noqa: BLE001 - it is logged
            if not future.done():
                future.set_exception(e)
            _log.exception("a rehearsal failed")
        finally:
            _threads.pop(thread, None)

    thread = threading.Thread(target=run, name="storesvc-rehearsal", daemon=True)
    _threads[thread] = future
    thread.start()


# Rehearsals log what a restart would hit, so the exit waits for them.
atexit.register(lambda: wait([*_threads.values()], _EXIT_SECONDS))

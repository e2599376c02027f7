"""Rehearsals: would what is saved come back? Found out at the save, not after a crash.

A rehearsal does what ``restore_state`` or ``restore_model`` will do in a new process,
with the document that the checkpoint gets: it builds the model by its class from the
config in the document, abstractly, compares the structures, and fits each leaf. It
makes no array, and reads none.

What would be refused is a warning in the log, with the call that works. It is rehearsed
once for each structure: a training run saves one structure again and again.
"""

import atexit
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from weakref import WeakKeyDictionary

import jax

from storesvc.format.trees import Tree
from storesvc_client._api.run import Run
from storesvc_client._pytree.restore_target import Target
from storesvc_client._pytree.save_plan import Plan
from storesvc_client._rpc.connection import Connection
from storesvc_client._save.handle import Save
from storesvc_client._values.options import Rehearse
from storesvc_client._values.values import LeafInfo
from storesvc_client.errors import MismatchError
from storesvc_client.trees.nnx.config_classes import (
    factory_of,
    needed_arguments,
    takes_config,
)
from storesvc_client.trees.nnx.graphs import GraphState, class_of
from storesvc_client.trees.nnx.model_parts import HasGraph
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.nnx.restore_model import (
    Options,
    Request,
    plan_module,
    plan_state,
)

__all__ = ["Rehearsal", "Rehearser"]

_EXIT_SECONDS: Final = 10.0
"""How long the end of a process waits for rehearsals."""

_log = logging.getLogger("storesvc_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The result of a rehearsal."""

    ok: bool
    """Whether the checkpoint can be restored by the class of its model, or, where that
    needs arguments of its own, by a factory."""
    message: str
    """Why it cannot, and what can be done; "" if it can."""


@dataclass(frozen=True)
class _Planned:
    """A checkpoint that is about to be saved."""

    name: str
    tree: Tree

    @property
    def structure(self) -> bytes:
        return self.tree.structure

    @cached_property
    def leaves(self) -> Mapping[str, LeafInfo]:
        rows = zip(self.tree.leaves, self.tree.grids, strict=True)
        return {leaf.key: LeafInfo.from_row(leaf, grid) for leaf, grid in rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The parts of a state or a module, abstract: nothing keeps the arrays."""

    graphdef: Any
    graphstate: GraphState
    graphother: GraphState
    tx: Any
    has_opt_state: bool
    is_state: bool

    @classmethod
    def of(cls, state: HasGraph, *, is_state: bool) -> "_Subject":
        """Returns the subject of a state, or of the parts of a module."""
        tx = getattr(state, "tx", None) if is_state else None
        return cls(
            graphdef=state.graphdef,
            graphstate=_abstract(state.graphstate),
            graphother=_abstract(state.graphother),
            tx=tx,
            has_opt_state=getattr(state, "opt_state", None) is not None,
            is_state=is_state,
        )


class Rehearser:
    """Rehearses the restore of one save, before or after it."""

    def __init__(
        self,
        run: Run,
        saved: HasGraph,
        *,
        rehearse: Rehearse,
        is_state: bool,
    ) -> None:
        """Prepares a rehearsal.

        Args:
            run: The run; what was rehearsed is known for as long as its client is.
            saved: The state, or the parts of a module.
            rehearse: "strict" refuses the save before it begins.
            is_state: Whether it is a state.
        """
        self._known = _Known.of(run._connection)  # noqa: SLF001 - of this library
        self._run = run.name
        self._saved: HasGraph | None = saved
        self._is_strict = rehearse == "strict"
        self._is_state = is_state
        self._plan: Plan | None = None

    def check(self, plan: Plan) -> None:
        """Takes the plan of the save, and with "strict" rehearses it.

        Raises:
            MismatchError: What would be saved could not be restored.
        """
        self._plan = plan
        if not self._is_strict:
            return
        found = self._known.result(self._run, plan)
        if found is None:
            found = self._rehearsed(plan, self._subject())
            self._known.add(self._run, plan, found)
        if not found.ok:
            raise MismatchError(f"save to {self._run}: {found.message}")

    def after(self, save: Save) -> "Future[Rehearsal] | None":
        """Rehearses in the background, once a save has ended, if it is the first one of
        its structure; call it before the arrays may change.

        Returns:
            The end of it; None where another process of the job rehearses.
        """
        plan = self._plan
        if plan is None or jax.process_index() != 0:
            return None
        future, is_new = self._known.begin(self._run, plan)
        if is_new:
            subject, self._saved = self._subject(), None

            def rehearse() -> None:
                save.wait()  # a training loop may be waiting for it, too
                found = self._rehearsed(plan, subject)
                if not found.ok:
                    _log.warning("%s: %s", self._run, found.message)
                future.set_result(found)

            _in_background(rehearse, future)
        return future

    def _subject(self) -> _Subject:
        assert self._saved is not None  # of a new structure, asked for once
        return _Subject.of(self._saved, is_state=self._is_state)

    def _rehearsed(self, plan: Plan, subject: _Subject) -> Rehearsal:
        stored = _Planned(self._run, plan.tree)
        cls = class_of(subject.graphdef)
        by_class = None if cls is None else _failure(stored, subject, cls)
        if cls is not None and by_class is None:
            return Rehearsal(ok=True, message="")
        again = _failure(stored, subject, subject)
        if again is None and (cls is None or _needs_arguments(cls, stored)):
            return Rehearsal(ok=True, message="")
        call = "restore_state" if subject.is_state else "restore_model"
        if again is None and cls is not None:
            message = (
                f"what was saved cannot be restored by its class, {call}(run, "
                f"model={cls.__name__}): {by_class}; restore it with {call}(run, "
                f"model={factory_of(cls)}), with the arguments that it was made with"
            )
            return Rehearsal(ok=False, message=message)
        message = (
            f"what was saved cannot be restored by {call}(run, model=...): {again}; "
            f"restore it as dicts and lists, with {call}(run), or with run.restore("
            "like=) a tree of the same structure"
        )
        return Rehearsal(ok=False, message=message)


def _needs_arguments(cls: type[Any], stored: _Planned) -> bool:
    """Whether a class needs what no checkpoint has: then its owner has a factory."""
    recipe = Recipe.unpack(stored.structure)
    has_config = recipe.config is not None and takes_config(cls, recipe)
    given = {"rngs", "config"} if has_config else {"rngs"}
    return not given.issuperset(needed_arguments(cls))


def _failure(stored: _Planned, subject: _Subject, model: Any) -> Exception | None:
    """The error that a restore with this model would raise; None if it would work."""
    options = Options(opt_state="skip") if _skips(subject) else Options()
    request = Request(
        model=model, tx=subject.tx if subject.has_opt_state else None, options=options
    )
    try:
        plan = (plan_state if subject.is_state else plan_module)(stored, request)
        by_key = stored.tree.by_key
        rows = [by_key[key] for key in plan.select]
        Target.choose(stored.tree, stored.name, rows=rows, **plan.target)
    except Exception as e:  # noqa: BLE001 - the caller's own code runs, too
        return e
    return None


def _skips(subject: _Subject) -> bool:
    """Whether no optimizer is known that the state of one could be restored with."""
    return subject.is_state and subject.tx is None


class _Known:
    """The rehearsals of one store, by structure: each is done once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, tuple[Plan, Future[Rehearsal]]] = {}
        self._found: dict[tuple[str, bytes], Future[Rehearsal]] = {}

    @classmethod
    def of(cls, connection: Connection) -> "_Known":
        """Returns what is known for a connection."""
        return _of_connections.setdefault(connection, cls())

    def begin(self, run: str, plan: Plan) -> "tuple[Future[Rehearsal], bool]":
        """Returns the rehearsal of a plan, and whether the caller is to do it."""
        with self._lock:
            last = self._last.get(run)
            if last is not None and last[0] is plan:  # the next save of a loop
                return last[1], False
            mine: Future[Rehearsal] = Future()
            future = self._found.setdefault((run, _digest(plan)), mine)
            self._last[run] = plan, future
            return future, future is mine

    def result(self, run: str, plan: Plan) -> Rehearsal | None:
        """Returns what came of the rehearsal of a plan; None where it has not ended."""
        with self._lock:
            last = self._last.get(run)
            if last is not None and last[0] is plan:
                future: Future[Rehearsal] | None = last[1]
            else:
                future = self._found.get((run, _digest(plan)))
        return future.result() if future is not None and future.done() else None

    def add(self, run: str, plan: Plan, found: Rehearsal) -> None:
        """Adds what came of a rehearsal."""
        ended: Future[Rehearsal] = Future()
        ended.set_result(found)
        with self._lock:
            known = self._found.setdefault((run, _digest(plan)), ended)
            self._last[run] = plan, known


_of_connections: "WeakKeyDictionary[Connection, _Known]" = WeakKeyDictionary()


def _digest(plan: Plan) -> bytes:
    """A digest of the structure and the leaves of a plan, without shardings."""
    digest = hashlib.sha256(plan.tree.structure)
    for leaf in plan.tree.leaves:
        digest.update(f"{leaf.key}\0{leaf.dtype}{leaf.shape}".encode())
    return digest.digest()


def _abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
            )
            if hasattr(leaf, "dtype") and hasattr(leaf, "shape")
            else leaf
        ),
        tree,
    )


_threads: dict[threading.Thread, "Future[Rehearsal]"] = {}


def _in_background(work: Callable[[], None], future: "Future[Rehearsal]") -> None:
    """Runs it in a daemon thread: a class that does not return must not keep a process
    from ending."""

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


@atexit.register
def _wait_for_all() -> None:
    """Lets rehearsals end, which warn of what a restart would meet."""
    wait([*_threads.values()], _EXIT_SECONDS)

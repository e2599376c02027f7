"""Saves a Keras model while it trains, and restores it, with the JAX backend.

Importing this module imports Keras, which is not among the dependencies of storesvc.
A checkpoint has the trainable and the other variables of the model and the variables of
its optimizer, by their Keras paths; metrics of Keras start again in each epoch and are
not saved. Keras numbers optimizers, seed generators and layers without a name in each
process. The numbers of optimizers and seed generators count from 0 here, in the order
in which a model has created them; give layers names, or call
``keras.utils.clear_session()`` before a model is created.

Example:
    epoch = 0 if run.latest_step() is None else restore_into(run, model)
    model.fit(x, y, epochs=10, initial_epoch=epoch, callbacks=[StoreCheckpoint(run)])
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any, Final, Literal

import keras
from keras.callbacks import Callback

from storesvc.format.keys import split_key
from storesvc.format.names import Which
from storesvc_client._api.run import Run, get_parts
from storesvc_client._restore.open_tree import OpenTree
from storesvc_client._values.options import ALL_PROCESSES
from storesvc_client.errors import InvalidRequestError, MismatchError, without_advice

__all__ = ["StoreCheckpoint", "restore_into"]

EPOCH_LABEL: Final = "keras/epoch"
"""Label with the number of epochs that were complete."""

_PARTS: Final = ("trainable_variables", "non_trainable_variables")
_OPTIMIZER: Final = "optimizer_variables"
_IMPORTED: Final = "pytree"
"""Item of an imported ``keras.callbacks.OrbaxCheckpoint`` with these parts."""

_NUMBERED: Final = {
    **dict.fromkeys(
        _PARTS, re.compile(r"(?:^|(?<=/))(seed_generator)(?:_(\d+))?(?=/)")
    ),
    _OPTIMIZER: re.compile(r"^([^/]+?)(?:_(\d+))?(?=/|$)"),
}
"""Names that Keras numbers in each process, in the paths of a part."""

_NUMBER: Final = re.compile(r"_\d+")

_logger: Final = logging.getLogger(__name__)


class StoreCheckpoint(Callback):  # type: ignore[misc]  # Keras has no annotations
    """A callback that saves the model at the end of each epoch, or every N batches.

    The step of a checkpoint is the number of batches that the optimizer has applied or
    accumulated; after one that it skipped, such as ``LossScaleOptimizer`` does, nothing
    is saved. A checkpoint keeps the metrics of the epoch or the batch. Saves continue
    in the background while training goes on; the end of ``fit`` waits for them.
    Retention policies of the run, such as ``KeepBest``, decide what stays.

    >>> model.fit(x, y, epochs=10, callbacks=[StoreCheckpoint(run)])
    """

    def __init__(
        self,
        run: Run,
        *,
        save_freq: "int | Literal['epoch']" = "epoch",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        """Creates the callback.

        Args:
            run: Run that the checkpoints will belong to.
            save_freq: "epoch", or a number of batches.
            monitor: Metric of which only improvements are saved, such as "val_loss";
                earlier checkpoints of the run count. None saves always.
            mode: Whether a lower ("min") or a higher value ("max") is better.

        Raises:
            InvalidRequestError: An argument is out of range, or Keras has another
                backend.
        """
        _check_backend()
        super().__init__()
        if not isinstance(run, Run):
            raise InvalidRequestError(f"StoreCheckpoint: expected a Run, got {run!r}")
        is_count = type(save_freq) is int and save_freq > 0
        if save_freq != "epoch" and not is_count:
            raise InvalidRequestError(
                "StoreCheckpoint: save_freq=: expected 'epoch' or a number of batches "
                f"above 0, got {save_freq!r}"
            )
        if mode not in ("min", "max"):
            raise InvalidRequestError(
                f"StoreCheckpoint: mode=: expected 'min' or 'max', got {mode!r}"
            )
        self._run = run
        self._every = save_freq if isinstance(save_freq, int) else None
        self._monitor = monitor
        self._sign = 1.0 if mode == "min" else -1.0
        self._best = float("inf")
        self._batches = 0
        self._epoch = 0
        self._saved = -1
        """Step of the last save; at first, that of the model."""

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Reads the best value of the monitored metric so far."""
        del logs
        self._batches = 0
        self._saved = _step(self.model)
        if self._monitor is None or self._run.latest_step() is None:
            return
        known = (found.metrics.get(self._monitor) for found in self._run.checkpoints())
        found = [self._sign * value for value in known if value is not None]
        self._best = min(found, default=self._best)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Notes how many epochs are complete."""
        del logs
        self._epoch = epoch

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Saves the model if the number of batches is reached."""
        del batch
        self._batches += 1
        if self._every is not None and self._batches % self._every == 0:
            self._save(logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Saves the model if it is saved by epochs."""
        self._epoch = epoch + 1
        if self._every is None:
            self._save(logs)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Waits for the saves in the background.

        Raises:
            StoreError: A save failed.
        """
        del logs
        self._run.wait()

    def _save(self, logs: Mapping[str, Any] | None) -> None:
        metrics = {name: float(value) for name, value in (logs or {}).items()}
        if self._monitor is not None:
            if self._monitor not in metrics:
                raise InvalidRequestError(
                    f"StoreCheckpoint: monitor=: expected one of "
                    f"{', '.join(sorted(metrics))}, got {self._monitor!r}"
                )
            value = self._sign * metrics[self._monitor]
            if not value < self._best:  # neither is NaN an improvement
                return
            self._best = value
        self.model.jax_state_sync()  # within an epoch, Keras has the values elsewhere
        step = _step(self.model)
        if step == self._saved:
            return
        self._saved = step
        parts = _parts(self.model).items()
        tree = {
            part: _nest_variables(
                (path, found.value) for path, found in variables.items()
            )
            for part, variables in parts
        }
        self._run.save(
            step, tree, metrics=metrics, labels={EPOCH_LABEL: str(self._epoch)}
        )


def restore_into(run: Run, model: Any, which: Which = "latest") -> int:
    """Restores a checkpoint into a model, and returns the number of complete epochs; of
    an imported ``OrbaxCheckpoint``, which does not state it, 0.

    Migrations of the run apply, see ``run.migrations``. Each variable keeps its dtype
    and its placement. A compiled model gets the variables
    of its optimizer, too; another one only its own.

    >>> model.fit(x, y, epochs=10, initial_epoch=restore_into(run, model))

    Args:
        run: Run of the checkpoint.
        model: The model, built.
        which: A step, "latest", or a tag.

    Raises:
        NotFoundError: There is no such checkpoint.
        MismatchError: It was saved from another model; lists every variable.
        InvalidRequestError: The model is not built, two of its variables have one path,
            or Keras has another backend.
    """
    _check_backend()
    if not getattr(model, "built", False):
        raise InvalidRequestError(
            f"restore of {run.name}: expected a model that is built, got {model!r}; "
            "call it once, or give it an Input"
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    parts = _parts(model)
    opening = get_parts(run).opening(which, distributed=ALL_PROCESSES)
    reader = opening.read(migrates=True)
    opened = OpenTree(reader.map_or_migrate(None))
    keys = [split_key(key) for key in opened.leaves]
    is_own = any(key[:1] == (part,) for key in keys for part in (*_PARTS, _OPTIMIZER))
    is_imported = not is_own and any(key[:1] == (_IMPORTED,) for key in keys)
    above = (_IMPORTED,) if is_imported else ()
    at = len(above)
    stored = {}
    for part in (*_PARTS, *([_OPTIMIZER] if optimizer is not None else [])):
        below = [key[at + 1 :] for key in keys if key[at : at + 1] == (part,)]
        saved = ["/".join(key) for key in below]
        stored[part] = dict(zip(_count_from_zero(part, saved), saved, strict=True))
    like: dict[str, Any] = {}
    for part, variables in parts.items():
        names = [stored[part].get(path, path) for path in variables]
        found = [variable.value for variable in variables.values()]
        like[part] = _nest_variables(zip(names, found, strict=True))
    select = [
        "/".join((*above, part, "**"))
        for part in stored
        if part in like or stored[part]
    ]
    try:
        with without_advice():
            restored = opened.restore(
                like={_IMPORTED: like} if above else like, select=select
            )
    except MismatchError as e:
        raise MismatchError(f"{e}{_advice(parts, stored)}") from e
    restored = restored[_IMPORTED] if above else restored
    for part, variables in parts.items():
        for path, variable in variables.items():
            place = stored[part][path].split("/")
            variable.assign(reduce(getitem, place, restored[part]))
    epoch = reader.info.labels.get(EPOCH_LABEL)
    if epoch is None:
        _logger.warning(
            "%s: the checkpoint does not state the number of complete epochs, as one "
            "of keras.callbacks.OrbaxCheckpoint; give fit() initial_epoch= yourself",
            opened.name,
        )
    return int(epoch or 0)


def _step(model: Any) -> int:
    """Returns the number of batches that the optimizer has applied or accumulated."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    found = [v for v in optimizer.variables if v.path.endswith("/iteration")]
    return int(found[0].value if found else optimizer.iterations)


def _parts(model: Any) -> dict[str, dict[str, Any]]:
    """Returns the variables of a model by the names that ``get_state_tree`` uses, and
    by their paths, with numbers that count from 0."""
    parts = {part: list(getattr(model, part)) for part in _PARTS}
    if getattr(model, "optimizer", None) is not None:
        parts[_OPTIMIZER] = list(model.optimizer.variables)
    found: dict[str, dict[str, Any]] = {}
    for part, variables in parts.items():
        paths = _count_from_zero(part, [each.path for each in variables])
        for path, variable in zip(paths, variables, strict=True):
            if path in found.setdefault(part, {}):
                raise _twice(variable.path)
            found[part][path] = variable
        _nest_variables((path, None) for path in found.get(part, ()))
    return found


def _count_from_zero(part: str, paths: Sequence[str]) -> list[str]:
    """Returns the paths with numbers that count from 0.

    Adafactor has several variables of one path: their order distinguishes
    them.
    """
    pattern = _NUMBERED[part]
    numbers: dict[str, set[int]] = {}
    for path in paths:
        for found in pattern.finditer(path):
            name = path[: found.start()] + found[1]
            numbers.setdefault(name, set()).add(int(found[2] or 0))

    def count(found: re.Match[str]) -> str:
        known = sorted(numbers[found.string[: found.start()] + found[1]])
        number = known.index(int(found[2] or 0))
        return f"{found[1]}_{number}" if number else found[1]

    counted, seen = [], Counter[str]()
    for new in (pattern.sub(count, path) for path in paths):
        seen[new] += 1
        is_again = part == _OPTIMIZER and seen[new] > 1
        counted.append(f"{new}#{seen[new] - 1}" if is_again else new)
    return counted


def _nest_variables(variables: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the values of variables, in dicts by the parts of their paths.

    Raises:
        InvalidRequestError: One path is below another.
    """
    tree: dict[str, Any] = {}
    for path, value in variables:
        *above, name = path.split("/")
        place: Any = tree
        for part in above:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                break
        if not isinstance(place, dict) or name in place:
            raise _twice(path)
        place[name] = value
    return tree


def _twice(path: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"expected one variable for each path, got two at {path!r}; give the layers of "
        "the model different names"
    )


def _advice(parts: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """Returns what to do about paths that differ; "" if nothing is known."""
    differing = [
        part for part in stored if parts.get(part, {}).keys() != stored[part].keys()
    ]
    bare = [
        {_NUMBER.sub("", path) for part in differing for path in found.get(part, {})}
        for found in (parts, stored)
    ]
    if differing and bare[0] == bare[1]:
        return (
            "; only numbers of Keras differ: call keras.utils.clear_session() before "
            "the model is created, or give its layers names"
        )
    if differing == [_OPTIMIZER]:
        return (
            "; only the optimizer differs: call restore_into before compile(), which "
            "restores the other variables, and save to another run"
        )
    return ""


def _check_backend() -> None:
    if keras.backend.backend() != "jax":
        raise InvalidRequestError(
            "storesvc_client.keras: expected the JAX backend of Keras, got "
            f"{keras.backend.backend()!r}; set KERAS_BACKEND=jax before importing keras"
        )

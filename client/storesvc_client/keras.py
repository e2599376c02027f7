"""Saves a Keras model while it trains, and restores it, with the JAX backend.

Importing this module imports Keras, which is not among the dependencies of storesvc.
A checkpoint has the trainable and the other variables of the model and the variables of
its optimizer, by their Keras paths; metrics of Keras start again in each epoch and are
not saved. Layers without a name are numbered by Keras in each process: give names, or
create the same layers in the same order.

Example:
    epoch = 0 if run.latest_step() is None else restore_into(run, model)
    model.fit(x, y, epochs=10, initial_epoch=epoch, callbacks=[StoreCheckpoint(run)])
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import keras
from keras.callbacks import Callback

from storesvc.format.names import Which
from storesvc_client._api.run import Run
from storesvc_client._values.options import ALL_PROCESSES
from storesvc_client.errors import InvalidRequestError

__all__ = ["StoreCheckpoint", "restore_into"]

EPOCH_LABEL: Final = "keras/epoch"
"""Label with the number of epochs that were complete."""

_PARTS: Final = ("trainable_variables", "non_trainable_variables")
_OPTIMIZER: Final = "optimizer_variables"


class StoreCheckpoint(Callback):  # type: ignore[misc]  # Keras has no annotations
    """A callback that saves the model at the end of each epoch, or every N batches.

    The step of a checkpoint is the number of batches that the optimizer has seen; it
    keeps the metrics of the epoch or the batch. Saves continue in the background
    while training goes on; the end of ``fit`` waits for them. Retention policies of the
    run, such as ``KeepBest``, decide what stays.

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

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Reads the best value of the monitored metric so far."""
        del logs
        self._batches = 0
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
        tree = {
            part: _nested(variables) for part, variables in _parts(self.model).items()
        }
        self._run.save(
            int(self.model.optimizer.iterations.value),
            tree,
            metrics=metrics,
            labels={EPOCH_LABEL: str(self._epoch)},
        )


def restore_into(run: Run, model: Any, which: Which = "latest") -> int:
    """Restores a checkpoint into a model, and returns the number of complete epochs.

    Each variable keeps its dtype and its placement. A compiled model gets the variables
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
    like = {part: _nested(variables) for part, variables in parts.items()}
    opened = run.open(which, distributed=ALL_PROCESSES)
    selected = None if _OPTIMIZER in parts else [f"{part}/**" for part in parts]
    restored = opened.restore(like=like, select=selected)
    for part, variables in parts.items():
        for variable in variables:
            variable.assign(_value_at(restored[part], variable.path))
    return int(opened.info.labels.get(EPOCH_LABEL, "0"))


def _parts(model: Any) -> dict[str, list[Any]]:
    """Returns the variables of a model by the names that ``get_state_tree`` uses."""
    parts = {part: list(getattr(model, part)) for part in _PARTS}
    if getattr(model, "optimizer", None) is not None:
        parts[_OPTIMIZER] = list(model.optimizer.variables)
    return {part: variables for part, variables in parts.items() if variables}


def _nested(variables: Iterable[Any]) -> dict[str, Any]:
    """Returns the values of variables, in dicts by the parts of their paths.

    Raises:
        InvalidRequestError: Two variables have one path, or one is below another.
    """
    tree: dict[str, Any] = {}
    for variable in variables:
        *above, name = variable.path.split("/")
        place: Any = tree
        for part in above:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                break
        if not isinstance(place, dict) or name in place:
            raise InvalidRequestError(
                f"expected one variable for each path, got two at {variable.path!r}; "
                "give the layers of the model different names"
            )
        place[name] = variable.value
    return tree


def _value_at(tree: Mapping[str, Any], path: str) -> Any:
    found: Any = tree
    for part in path.split("/"):
        found = found[part]
    return found


def _check_backend() -> None:
    if keras.backend.backend() != "jax":
        raise InvalidRequestError(
            "storesvc_client.keras: expected the JAX backend of Keras, got "
            f"{keras.backend.backend()!r}; set KERAS_BACKEND=jax before importing keras"
        )

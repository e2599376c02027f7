"""Provides the training text: the topics of ``help()``, prose that ships with Python.

The bytes of a batch are a function of the step alone, so that a resumed run sees the
batches of an uninterrupted one.
"""

from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt

__all__ = ["Corpus"]

_SEED = 20_260_401


class Corpus:
    """Makes batches of text windows, as bytes."""

    def __init__(self, *, batch_size: int, window: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self._bytes = np.frombuffer(text.encode(), np.uint8)
        self._batch_size = batch_size
        self._window = window

    def batch(self, step: int) -> npt.NDArray[np.int32]:
        """Returns the batch of a step: ``batch_size`` rows of ``window + 1`` bytes,
        each window with the byte that follows it."""
        draw = np.random.default_rng((_SEED, step))
        starts = draw.integers(len(self._bytes) - self._window, size=self._batch_size)
        columns = np.arange(self._window + 1)
        windows: npt.NDArray[np.uint8] = self._bytes[starts[:, None] + columns]
        return windows.astype(np.int32)

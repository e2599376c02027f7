"""A fit of Keras with its own callback: ``python loop_of_keras.py OUT``."""

import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

out = sys.argv[1]
Path(out).mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(optimizer="adam", loss="mse")
x = np.arange(64, dtype=np.float32).reshape(16, 4)


class Shown(keras.callbacks.Callback):  # type: ignore[misc] # no types
    """Says where the fit begins."""

    said = False

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if not self.said:
            print(f"resumed from step {epoch}", flush=True)
        self.said = True


backup = keras.callbacks.BackupAndRestore(out + "/backup", delete_checkpoint=False)
model.fit(
    x,
    x.sum(axis=1),
    epochs=4,
    shuffle=False,
    verbose=0,
    callbacks=[backup, Shown()],
)
np.save(out + "/final.npy", model.get_weights()[0])

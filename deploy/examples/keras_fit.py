"""Trains a Keras model with the JAX backend, saves to a store, and resumes from it.

Kill it at any moment and run it again: it continues after the last complete epoch.

    KERAS_BACKEND=jax python keras_fit.py --store file:///tmp/ckpts
"""

import argparse

import keras
import numpy as np

import storesvc_client as store
from storesvc_client.keras import StoreCheckpoint, restore_into

parser = argparse.ArgumentParser(description="Train a small Keras model.")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--store", required=True, metavar="TARGET")
options = parser.parse_args()

keras.utils.set_random_seed(0)
layers = [
    keras.Input((8,)),
    keras.layers.Dense(64, activation="tanh", name="hidden"),
    keras.layers.Dropout(0.1, name="dropout"),
    keras.layers.Dense(1, name="out"),
]
model = keras.Sequential(layers, name="mlp")
model.compile(optimizer=keras.optimizers.Adam(1e-3, name="adam"), loss="mse")
x = np.random.default_rng(1).normal(size=(640, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
# In a fixed order, so that a resumed training sees the batches of an uninterrupted one.
how = {"epochs": options.epochs, "shuffle": False, "verbose": 0}
with store.connect(options.store) as client:
    run = client.run("examples/keras")
    run.retention.set(store.KeepLatest(3))
    start = 0 if run.latest_step() is None else restore_into(run, model)
    model.fit(x, y, **how, initial_epoch=start, callbacks=[StoreCheckpoint(run)])
    print(f"saved step {run.latest_step()}")

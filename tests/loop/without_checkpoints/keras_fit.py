"""Trains a Keras model without checkpoints, to be compared with `keras_fit.py`."""

import argparse

import keras
import numpy as np

parser = argparse.ArgumentParser(description="Train a small Keras model.")
parser.add_argument("--epochs", type=int, default=20)
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
model.fit(x, y, **how)

"""Compares the speed of this store with Orbax and with floors on states of any shape.

    python -m benchmarks shapes [--seed 9] [--rounds 6] [--quick] [--tls]
                                 [--values {weights,bits}]
                                 [--only SHAPE ...] [--contenders NAME ...]

``drawing.py`` draws the leaves of each shape from a seed. For each shape, every
contender is one process that lives for all rounds (``worker.py``), as a training job
does; in each round ``running.py`` asks each of them, in a random order, for a save of
new values and a restore. The first round restores what another process has saved, then
saves, and is shown apart. Ratios are taken within a round, because seconds on a shared
machine vary; ``ratios.py`` computes how certain their median is, and rounds go on until
it is certain. ``bars.py`` holds the limits. Tables, JSON and a plot go to
``build/bench/``.
"""

from benchmarks.shapes.running import main

__all__ = ["main"]

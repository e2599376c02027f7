"""Compares the speed of this store with its peers and with floors, at the same work.

    python -m benchmarks.speed [WORK ...] [--rounds 5] [--on tmpfs disk]
                                [--only NAME ...] [--of STATE]

Each round runs every contender once, each in a new process, in a new random order. A
contender makes the state, warms up with a small state, saves and restores, and compares
the two states bit by bit outside the timed parts. The printed numbers are medians over
the rounds, and ratios within one run, because seconds on a shared machine vary. Without
WORK, all works are run and compared with the bars of this store.

``works.py`` names works and contenders; ``states.py`` makes the states; ``floors.py``,
``ours.py``, ``peers.py`` and ``buckets.py`` are the contenders; ``worker.py`` runs one
contender in one round. JSON, tables and plots are written to ``build/bench/``.
"""

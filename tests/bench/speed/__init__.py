"""Speed, side by side: the same work by this store, by its peers, and by the floors.

    python -m tests.bench.speed [WORK ...] [--rounds 5] [--on tmpfs disk]
                                [--only NAME ...] [--of STATE]

Each round runs every contender once, in a process of its own, in an order that is
drawn anew: it makes the state, warms up with a small one, saves, restores, and
compares bit by bit, outside the timed parts. What is printed are medians over the
rounds, and ratios of one run: the machine is shared, and seconds alone say little.
Without a work all are run, and the bars of this store judged by them.

``works.py`` names what there is; ``states.py`` makes what is saved; ``floors.py``,
``ours.py``, ``peers.py`` and ``buckets.py`` hold who saves it; ``worker.py`` is one of
them in one round. JSON, tables and plots go to ``build/bench/``.
"""

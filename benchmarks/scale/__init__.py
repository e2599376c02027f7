"""Counts what storesvc costs as its use grows, and computes the costs of a fleet.

    python -m benchmarks.scale [--quick] [--only SERIES ...] [--assert]

Requests, bytes and CPU are counted, not seconds: they do not depend on the machine. A
series varies one size: the processes P of a joint save, the steps N of a run, its data
files M, the runs R of a store, the leaves L of a tree. The exponent of a law is the
slope of log cost over log size, over the sizes from 8 on.

| what is here | and in a job |
|---|---|
| ``tests.fake_gcs`` on a thread, whose CPU is subtracted | a bucket |
| a thread with a client and an embedded store of its own | a process of the job |
| ``tests.support.thread_job``: a dict | the coordination service of jax |
| records of one real checkpoint, sealed again under other names | steps, runs, files |

Clients, stores and their protocol are the product's. Threads share the cores, and meet
more often than processes do: what depends on it, such as commits at once, is a bound.

Tables, JSON and a plot go to ``build/bench/``.
"""

from benchmarks.scale.running import main

__all__ = ["main"]

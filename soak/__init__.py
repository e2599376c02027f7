"""Faults of machines, at every point of a store's work.

    make soak                       # all, in an hour
    make soak SOAK="kill_points bit_flips"

Each module injects one kind of fault in a function of its name, which returns the
number of points that it tried, and the losses.
"""

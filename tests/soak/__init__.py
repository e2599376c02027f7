"""All that a machine can do to a store, at every point of its work.

    make soak                       # all, in three quarters of an hour
    make soak SOAK="kill_points bit_flips"

Each module does one kind of harm in a function of its name, and returns how many
points it tried and what was lost.
"""

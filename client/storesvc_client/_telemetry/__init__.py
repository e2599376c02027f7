"""Measures saves and restores, and reports them to the caller and to monitoring.

It may import `_values` and `_views`.

Begin with `progress.py`: one `Meter` measures an operation; `reports.py` has what it
found, and `events.py` sends it.
"""

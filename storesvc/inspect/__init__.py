"""The inspection path: verifies stored bytes of checkpoints, compares checkpoints.

It may import `storesvc.catalog` and the layers below it, and none of the packages
`lifecycle`, `save`, `restore` and `watch`.

Begin with `verify.py` and `diff.py`, which read; `damage.py`, `verify_report.py` and
`diff_rules.py` decide.
"""

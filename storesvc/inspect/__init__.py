"""The inspection path: verifies stored bytes of checkpoints, compares checkpoints.

It may import `storesvc.catalog` and the layers below it, and none of the packages
`lifecycle`, `save`, `restore` and `watch`.

Begin with `verify.py`, which reads; `rules.py` decides.
"""

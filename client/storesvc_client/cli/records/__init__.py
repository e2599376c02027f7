"""Lists of runs, checkpoints and leaves: their fields, conditions and orders.

`query` and `comparison` decide over the fields that `fields` names; `selection` applies
them; `views` reads records and lays them out. Begin with `views.py`.
"""

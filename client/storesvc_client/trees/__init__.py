"""Names, saves and restores models: NNX graphs, Linen variables, EasyDeL states.

It imports jax and flax, and of the client everything below it; only `easydel` and the
demo import it. The modules here are public, and import `nnx` and `structure`, which are
not.

Begin with `easydel.py` (``EasyDeLState``); `protocols.py` says what a model may offer,
`traversals.py` has the functions of ``easydel.utils.traversals``, and `linen.py`
converts between Linen and NNX.
"""

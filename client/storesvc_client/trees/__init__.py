"""Names, saves and restores models: NNX graphs, Linen variables, EasyDeL states.

Imports jax and flax, and every layer of the client below it; only `easydel` and the
demo import it. The modules here are public; `nnx` and `structure`, which they import,
are not.

Start with `easydel.py` (``EasyDeLState``). `protocols.py` describes what a model may
provide, `traversals.py` has the functions of ``easydel.utils.traversals``, and
`linen.py` converts between Linen and NNX.
"""

"""State trees: the only folder of the client that imports jax and flax.

Saving goes from a tree to named leaves, and restoring from named leaves to a tree:

* ``flattening``, ``snapshot``: a tree as leaves with keys, and a copy of its bytes.
* ``matching``, ``placing``, ``partitioning``, ``restoring``, ``nesting``: which leaf of
  a checkpoint is which of the target, where it goes, and what is made of them.

Models are trees whose structure is code. A restore asks the caller for the code, and
compares it with what the checkpoint says of it:

* ``easydel``: ``EasyDeLState``. ``parts``, ``protocols``: what a model tells of itself.
* ``recipes``, ``structure``, ``containers``, ``config_differences``: what a checkpoint
  tells of its model, as data.
* ``blueprints``, ``sourcing``, ``optimizers``, ``rebuild``: from the code and a
  checkpoint to the state.

``traversals`` is the public face of ``dicts``, ``graphs``, ``making``, ``merging``,
``meta_values``, ``pytrees`` and ``validating``; ``linen`` crosses over to Linen.
"""

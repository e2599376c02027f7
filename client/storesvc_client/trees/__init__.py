"""State trees: the only folder of the client that imports jax and flax."""

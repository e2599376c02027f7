"""The checkpoint store's service. It never imports jax or flax."""

from importlib.metadata import version

__version__ = version("storesvc")

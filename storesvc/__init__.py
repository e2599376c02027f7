"""The checkpoint store's service. It never imports jax or flax."""


def __getattr__(name: str) -> str:
    # looked up when it is asked for: it takes longer than storectl may
    if name == "__version__":
        from importlib.metadata import version

        return version("storesvc")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

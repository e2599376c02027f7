"""The service side of the checkpoint store. It never imports jax or flax."""


def __getattr__(name: str) -> str:
    # Looked up once, on first use: that alone takes longer than storectl may to start.
    if name == "__version__":
        from importlib.metadata import version

        return str(globals().setdefault(name, version("storesvc")))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

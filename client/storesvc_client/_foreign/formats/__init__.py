"""One module for each format that storesvc reads.

Each has ``open_root(location)``, which returns the ``ForeignRoot`` of a location, or
raises an error that states what was expected there. Begin with ``safetensors.py``.
"""

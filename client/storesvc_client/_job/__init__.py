"""Coordinates the processes of one job that save or restore together.

It may import `storesvc_client._values` and `storesvc_client.errors`; it knows neither
jax nor the server.

Begin with `job.py`, the board that the processes share; `assignment.py` decides which
process writes or reads which chunks.
"""

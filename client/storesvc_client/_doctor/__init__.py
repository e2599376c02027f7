"""Checks whether a place can hold a store: a directory, a bucket, or a server.

It stands above the API, with which it makes a real save. Begin with `doctor.diagnose`.
"""

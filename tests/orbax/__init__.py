"""Tests of Orbax's managers over a store, with Orbax's own as the oracle."""

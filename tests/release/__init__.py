"""Tools of a release: its artefacts, and the environments that it supports."""

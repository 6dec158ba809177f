"""Stands in for the real workers where a test puts this folder first on the module path of pods."""

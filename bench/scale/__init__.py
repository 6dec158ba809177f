"""Operators with a thousand objects each, on one API server: what `bench.operator_scale` measures."""

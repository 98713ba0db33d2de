"""Kernels of the hot path, each with a reference and one file a backend."""

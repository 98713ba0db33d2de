"""Decoder-only transformers by configuration."""

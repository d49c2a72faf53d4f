"""Checkpoints and weights files."""

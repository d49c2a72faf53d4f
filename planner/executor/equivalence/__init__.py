"""Equivalence check: compare the training of a model's stages with that of the unpartitioned model."""

"""What outlives a run: checkpoints and weights."""

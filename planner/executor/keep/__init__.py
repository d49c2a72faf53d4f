"""Read and write checkpoints and weights files."""

"""The pipeline as one JAX program."""

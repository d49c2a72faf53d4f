"""The bridge to JAX and to the TPU's compiler: the one room that imports jax and torchax."""

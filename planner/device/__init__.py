"""Clocks, memory meters and names of the kinds of devices: CPUs and GPUs."""

"""Clocks, memory meters, and one class for each kind of device (CPU, CUDA GPU)."""

"""Differences between kinds of devices: clocks, memory, names."""

"""Checks of plans: do they fit the memory limits, do predictions agree with measurements, how do plans differ."""

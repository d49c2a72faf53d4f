"""Checks of plans: memory limits, predicted against measured values, and differences between plans."""

"""Checks of plans: memory limits, measured against predicted values, and differences between plans."""

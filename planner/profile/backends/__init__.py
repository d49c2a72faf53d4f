"""Backends that find the times and memory of a profile: they measure, estimate, or compile."""

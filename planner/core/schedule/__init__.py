"""Schedules: which device does what in which order."""

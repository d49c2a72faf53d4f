"""Core: frozen values, and models of memory, time and schedules.

The lowest layer of the package: only the standard library and numpy, without printing, files or clocks.
"""

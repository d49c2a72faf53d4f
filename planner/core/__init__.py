"""Core: frozen values, and models of memory, time and schedules.

All other packages may import `core`. It uses only the standard library and numpy, and never prints, reads files or
reads clocks.
"""

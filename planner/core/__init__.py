"""Frozen values and the laws over them: units, errors, profile, plan, memory, time, schedules, simulator.

The lowest floor: standard library and numpy only, no printing, no files, no clock.
"""

"""Searches for plans with several stages on each device.

Read `search.py` first. If there are few partitions, all of them are simulated. Otherwise `descent.py` and
`cut_search.py` improve the cuts step by step, and `fitting.py` chooses what to recompute. The linear program of
`linear_program.py` gives a lower bound, and `branch_and_bound.py` raises this bound.
"""

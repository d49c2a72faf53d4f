"""Searches for plans with several stages on each device.

Read `search.py` first. Few partitions are all simulated; else `descent.py` and `cut_search.py` improve the cuts step by
step, `fitting.py` chooses what to recompute, and a linear program (`linear_program.py`), made tighter by branch and
bound (`branch_and_bound.py`), gives a lower bound.
"""

"""The plans to choose from in one case: its stages as tables, and partitions of it judged many at once.

Read `case.py` first. It turns the memory tables of `tables.py` into a `ChainProblem` (`problem.py`): all stages by
their first and last layer. `partitions.py` simulates whole partitions, and adds up the memory of their devices.
"""

"""Search space: tables of all possible stages, and evaluation of partitions in batches.

Read `case.py` first. It turns the memory tables of `tables.py` into a `ChainProblem` (`problem.py`): all stages by
their first and last layer. `partitions.py` simulates whole partitions and computes the memory of their devices.
`prefixes.py` has lower bounds of values such as the longest stage time, over all ways to cut the first layers.
"""

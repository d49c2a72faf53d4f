"""Searches for plans with one stage per device: GPipe and 1F1B.

Read `chain_dp.py` first: the exact dynamic program over cuts. `recurrences.py` computes its step times for each
schedule. `gpipe.py` and `one_forward_one_backward.py` are the searches. `bottlenecks.py` speeds up the GPipe search.
"""

"""Searches for plans with one stage on each device: GPipe and 1F1B.

Read `chain_dp.py` first: the label dynamic program, exact for any cuts. `laws.py` says what a label is under each
schedule. `gpipe.py` and `one_forward_one_backward.py` are the searches, `bottlenecks.py` speeds up the first of them,
and `any_order.py` runs it for every order of unlike devices.
"""

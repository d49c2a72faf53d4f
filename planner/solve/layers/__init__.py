"""Searches that choose layer by layer what to recompute (`--recompute layers`).

Read `search.py` first. With one stage per device it calls `joint.py`, an exact search for cuts and recomputed layers
together. Otherwise a local search over cuts (`cut_search.py`) gets the recomputation of each device from `devices.py`.
`cheapest.py` finds the layers to recompute in one stage, `subsets.py` lists the useful subsets of the layers of a short
stage, and `stage_times.py` has lower bounds of the recomputation time of all stages.
"""

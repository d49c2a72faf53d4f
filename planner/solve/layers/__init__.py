"""Searches that recompute single layers (`--recompute layers`).

Read `search.py` first. With one stage per device it calls `joint.py`, which searches cuts and layers together, exactly.
Otherwise a descent over cuts (`cut_search.py`) gets the recomputation of each device from `devices.py`. `cheapest.py`
finds the cheapest layers of one stage under its memory limit, `subsets.py` lists the useful subsets of a short stage,
and `stage_times.py` has lower bounds for all stages.
"""

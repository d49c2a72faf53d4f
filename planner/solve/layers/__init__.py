"""Searches that recompute single layers (`--recompute layers`).

Read `search.py` first: it chooses among `joint.py` (one stage on each device: layers and cuts together, exactly) and a
descent over cuts (`cut_search.py`) that asks `devices.py` what each device recomputes. `cheapest.py` finds the cheapest
layers of one stage under its memory limit; `stage_times.py` has bounds of that for all stages.
"""

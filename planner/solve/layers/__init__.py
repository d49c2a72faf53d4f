"""Searches that recompute single layers (`--recompute layers`).

Read `cheapest.py` first: the cheapest layers of one stage under its memory limit. `chunks_of_device.py` shares the
limit among the stages of a device, and `search.py` chooses the cuts.
"""

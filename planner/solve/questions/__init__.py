"""Questions about a plan, each answered by solving variations of its request.

Read `insight.py` first: it explains what limits a plan. `certificate.py` checks the claims of a plan, `remedy.py` finds
changes that would fit, `faster.py` and `trade_off.py` compare schedules, `sweep.py` plans for several cluster sizes.
"""

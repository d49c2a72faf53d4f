"""Questions about a plan, answered by solving variations of its request.

Read `insight.py` first: it explains what limits a plan. `certificate.py` checks if a plan is optimal as it claims,
`remedy.py` finds changes with which it fits, `faster.py` and `trade_off.py` compare schedules, and `sweep.py` plans for
several cluster sizes.
"""

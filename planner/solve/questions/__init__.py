"""Questions about a plan. Each is answered by solving variations of the plan's request.

Read `insight.py` first: it explains what limits a plan. `certificate.py` checks if a plan is optimal as it claims,
`remedy.py` finds changes with which a plan fits, `faster.py` and `trade_off.py` compare schedules, and `sweep.py` plans
for several cluster sizes.
"""

"""Questions about a plan, each answered by solving again with one thing changed.

`certificate.py` checks what a plan claims, `remedy.py` finds what would fit, `faster.py` and `trade_off.py` compare
schedules, `insight.py` explains what limits a plan, and `sweep.py` plans for many cluster sizes.
"""

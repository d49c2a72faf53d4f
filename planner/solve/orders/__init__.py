"""Searches for schedules that the solver makes itself: action orders and cuts together.

Read `search.py` first: it improves cuts and action orders in turn. `list_scheduling.py` makes an action order by rules,
`order_search.py` improves it, and `period_bound.py` has a lower bound of the step time for every order.
"""

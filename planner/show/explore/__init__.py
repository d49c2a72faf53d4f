"""Interactive report: a page with adjustable cuts, micro-batches, schedule and memory limits.

Python computes all numbers (`planner.show.explore.data`). The scripts of the page compute only sums and maxima of these
numbers.
"""

from planner.show.explore.page import explore_html
from planner.show.explore.request import ExplorerRequest

__all__ = ["ExplorerRequest", "explore_html"]

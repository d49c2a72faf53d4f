"""Interactive report: a page with adjustable cuts, micro-batches, schedule and memory limits.

Python computes all numbers (`planner.show.explore.data`). The page's scripts compute only their sums and maxima.
"""

from planner.show.explore.page import explore_html
from planner.show.explore.request import ExplorerRequest

__all__ = ["ExplorerRequest", "explore_html"]

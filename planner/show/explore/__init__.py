"""Interactive report: a page with adjustable cuts, micro-batches, schedule and memory limits.

Python writes the numbers (`planner.show.explore.data`): the memory of every stage, durations, and action orders with
the dependencies and memory changes of each action. The scripts of the page only add these numbers and take maxima
(`evaluate.js`). They contain no rule of the cost model and no schedule.
"""

from planner.show.explore.page import explore_html
from planner.show.explore.request import ExplorerRequest

__all__ = ["ExplorerRequest", "explore_html"]

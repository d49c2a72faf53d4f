"""Interactive report: a page with adjustable cuts, M, schedule and memory limits, which updates all figures at once.

Python writes the numbers (`planner.show.explore.data`): bytes of every stage by part and component, durations, and
action orders. Each action has its dependencies and its changes of the counted memory. The page adds these and takes
maxima (`evaluate.js`). JavaScript contains no rule of the cost model and no schedule.
"""

from planner.show.explore.page import explore_html
from planner.show.explore.question import Question

__all__ = ["Question", "explore_html"]

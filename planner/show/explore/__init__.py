"""The interactive report: a page on which cuts, M, schedule and memory limits move, and all figures follow at once.

Python writes the numbers (`planner.show.explore.data`): bytes of every stage by part and item, durations, and action
orders with what each action needs and how it changes the memory that is counted. The page adds these and takes maxima
(`evaluate.js`). JavaScript contains no rule of the cost model and no schedule.
"""

from planner.show.explore.page import explore_html
from planner.show.explore.question import Question

__all__ = ["Question", "explore_html"]

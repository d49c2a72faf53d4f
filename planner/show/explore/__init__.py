"""The report with handles: a page on which cuts, M, schedule and caps can be moved, and all figures follow at once.

The laws stand there a second time, in JavaScript: what a schedule makes devices do (`schedule.js`), what stages hold
(`memory.js`), and what becomes of both (`evaluate.js`). Tests hold them against the core on random edits. Schedules
they do not know: the page brings along the lists of actions that the core made (`planner.show.explore.lists`).
"""

from planner.show.explore.page import explore_html
from planner.show.explore.question import Question

__all__ = ["Question", "explore_html"]

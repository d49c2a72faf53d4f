"""Lists of actions for the page: which schedules, with how many chunks and micro-batches, and each list as a text.

The page knows no schedule. What each makes devices do comes along as data, so that one that is added to the core is
there without a line of JavaScript. Long lists are left out, the plan's own never.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from planner.core.errors import UsageError
from planner.core.schedule import KINDS, SCHEDULES, Action, Schedule, schedule_of
from planner.core.values.plan import Plan
from planner.show.explore.question import Question

MOST_ACTIONS: Final = 400_000
"""Actions of all lists together: about as many bytes of the page."""

MOST_CHUNKS: Final = 4
"""Chunks per device that there is a choice of, as for the solver."""

_LETTERS: Final = tuple(KINDS)

List = str | list[int]
"""A letter per action, or the actions as numbers; see `schedule.js`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A schedule with the lists of actions that there is room for."""

    schedule: Schedule
    lists: Mapping[int, Mapping[int, tuple[List, ...]]]
    """By chunks per device and micro-batches: a list for each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """What there is to choose from."""

    schedules: tuple[Listed, ...]
    is_complete: bool
    """Whether there was room for all lists."""


def menu_of(question: Question) -> Menu:
    """The schedules that can run the plan's devices, each with its lists, the short ones first to be made."""
    plan = question.plan
    chosen = schedule_of(plan.schedule, plan.order), plan.chunks, plan.micro_batches
    cases = sorted(_cases(question), key=lambda case: (case != chosen, case[1] * case[2]))
    lists: dict[str, dict[int, dict[int, tuple[List, ...]]]] = {}
    left, is_complete = MOST_ACTIONS, True
    for schedule, chunks, micro_batches in cases:
        least = 2 * plan.num_devices * chunks * micro_batches
        if left < least and (schedule, chunks, micro_batches) != chosen:
            is_complete = False
            break
        try:
            rows = schedule.actions(plan.num_devices, micro_batches, chunks)
        except UsageError:
            continue  # it does not run so many micro-batches
        left -= sum(map(len, rows))
        texts = tuple(
            _text(row, schedule.stages_on(device, plan.num_devices, chunks), plan.num_devices * chunks)
            for device, row in enumerate(rows)
        )
        lists.setdefault(schedule.name, {}).setdefault(chunks, {})[micro_batches] = texts
    listed = (
        Listed(schedule=schedule, lists=lists[schedule.name])
        for schedule in _schedules(question)
        if schedule.name in lists
    )
    return Menu(schedules=tuple(listed), is_complete=is_complete)


def _schedules(question: Question) -> Iterator[Schedule]:
    """All schedules by name, and the plan's own if it was made for it."""
    plan = question.plan
    for schedule in SCHEDULES.values():
        # Backwards in halves need two devices; and programs that are compiled run them whole.
        can_split = plan.num_devices > 1 and question.profile.device.how != "compiled"
        if not schedule.splits_backward or can_split or schedule.name == plan.schedule:
            yield schedule
    if plan.schedule not in SCHEDULES:
        yield schedule_of(plan.schedule, plan.order)


def _cases(question: Question) -> Iterator[tuple[Schedule, int, int]]:
    """Schedule, chunks, micro-batches."""
    plan, num_layers = question.plan, len(question.profile.layers)
    # Devices that were put into an order of their own have a stage each.
    is_placed = any(stage.device is not None for stage in plan.stages)
    for schedule in _schedules(question):
        if schedule.texts:
            yield schedule, plan.chunks, plan.micro_batches
            continue
        for chunks in _chunks(schedule, plan):
            can_run = chunks == 1 or (plan.num_devices > 1 and not is_placed)
            if can_run and plan.num_devices * chunks <= num_layers:
                yield from ((schedule, chunks, m) for m in question.micro_batches)


def _chunks(schedule: Schedule, plan: Plan) -> Sequence[int]:
    if schedule.exact_chunks is not None:
        return (schedule.exact_chunks,)
    if not schedule.is_chunked:
        return (1,)
    return sorted({*range(2, MOST_CHUNKS + 1), *([plan.chunks] if schedule.name == plan.schedule else [])})


def _text(row: Sequence[Action], stages: Sequence[int], num_stages: int) -> List:
    """A letter per action where each kind of each chunk goes through the micro-batches in order, else numbers."""
    codes = {
        (stage, kind): 4 * chunk + place for chunk, stage in enumerate(stages) for place, kind in enumerate(_LETTERS)
    }
    following = {code: count() for code in codes.values()}
    text = []
    for action in row:
        code = codes[action.stage, action.kind]
        if next(following[code]) != action.micro_batch:
            return [(a.micro_batch * num_stages + a.stage) * len(_LETTERS) + _LETTERS.index(a.kind) for a in row]
        text.append(chr(65 + code))
    return "".join(text)

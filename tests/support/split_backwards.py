"""Schedules with split backward, derived from others: I at the position of the backward, W later."""

from planner.core.schedule import Action

__all__ = ["split_backwards"]


def split_backwards(actions: tuple[tuple[Action, ...], ...], later: int) -> tuple[tuple[Action, ...], ...]:
    """Return the action order with each W `later` actions after its I, in the order of the I.

    The backward of every fourth micro-batch stays whole, after all deferred W, so that gradients are added in the
    original order.
    """
    return tuple(_row(row, later) for row in actions)


def _row(whole: tuple[Action, ...], later: int) -> tuple[Action, ...]:
    actions: list[Action] = []
    waiting: list[tuple[int, Action]] = []  # from which number of actions on, a W
    for action in whole:
        stays = action.kind == "B" and action.micro_batch % 4 == 3
        while waiting and (stays or waiting[0][0] <= len(actions)):
            actions.append(waiting.pop(0)[1])
        if action.kind == "B" and not stays:
            actions.append(Action(action.stage, "I", action.micro_batch))
            waiting.append((len(actions) + later, Action(action.stage, "W", action.micro_batch)))
        else:
            actions.append(action)
    return (*actions, *(action for _, action in waiting))

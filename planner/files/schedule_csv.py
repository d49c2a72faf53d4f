"""Read schedules in torch's compute-only CSV format, written by gpipe-plan, by another engine or by hand."""

from planner.core.errors import FileError, UsageError
from planner.core.schedule import ListedSchedule, check_orders, orders_from_csv
from planner.files.reading import read_text


def read_schedule(path: str) -> ListedSchedule:
    """Read a schedule from a CSV file, and check that it can run.

    Its stages must be placed in a loop or a V.

    Raises:
        FileError: The file cannot be read, a cell is not an action, or the action orders are invalid. The error names
            the row (from 1) and the column, or the device (from 0) and the action.
    """
    text = read_text(path, "gpipe-plan emit --format csv")
    try:
        rows = orders_from_csv(text)
    except UsageError as error:
        raise FileError(error.message, path=path, hint=error.hint) from None
    schedule = ListedSchedule(rows)
    num_micro_batches = 1 + max(action.micro_batch for row in rows for action in row)
    try:
        check_orders(rows, num_micro_batches)
        num_stages = len({action.stage for row in rows for action in row})
        schedule.actions(len(rows), num_micro_batches, num_stages // len(rows))
        _ = schedule.placement
    except UsageError as error:
        raise FileError(error.message, path=path, hint=f"{error.hint}; row 1 is device 0") from None
    return schedule

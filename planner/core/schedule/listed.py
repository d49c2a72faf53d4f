"""Schedule with action orders that the user wrote or that a search found.

A plan stores action orders as text, one line per device, in the notation of torch's schedule files: `0F0 0F1 0I0`.
"""

from collections.abc import Sequence
from functools import cached_property

from planner.core.errors import UsageError
from planner.core.schedule.base import Action, Schedule
from planner.core.schedule.program import devices_of
from planner.core.values.placement import Placement, device_of


class ListedSchedule(Schedule):
    """Schedule with action orders that the user wrote or that a search found.

    Args:
        rows: Actions of each device, in order; empty before the search.
        meant_for: Placement of the stages if `rows` is empty.
    """

    name = "search"
    title = "searched schedule"
    torch_name = ""
    is_chunked = True

    def __init__(self, rows: tuple[tuple[Action, ...], ...] = (), *, meant_for: Placement = "loop") -> None:
        self.rows = rows
        self._meant_for = meant_for
        self.needs_search = not rows

    def __eq__(self, other: object) -> bool:
        """Return True if action orders and placements are equal."""
        return isinstance(other, ListedSchedule) and (self.rows, self._meant_for) == (other.rows, other._meant_for)

    def __hash__(self) -> int:
        """Return the hash of action orders and placement."""
        return hash((self.rows, self._meant_for))

    @cached_property
    def splits_backward(self) -> bool:  # type: ignore[override]
        """True if a backward is split, or if there are no action orders yet."""
        return not self.rows or any(action.kind == "W" for row in self.rows for action in row)

    @property
    def exact_chunks(self) -> int | None:  # type: ignore[override]
        """Number of stages per device that the schedule requires; None if it is not fixed."""
        return 2 if not self.rows and self._meant_for == "v" else None

    @cached_property
    def placement(self) -> Placement:  # type: ignore[override]
        """Placement of the stages in the action orders.

        Raises:
            UsageError: The stages are placed neither as a loop nor as a V.
        """
        if not self.rows:
            return self._meant_for
        devices, num_devices = devices_of(self.rows), len(self.rows)
        for placement in ("loop", "v"):
            if all(device_of(s, num_devices, placement) == device for s, device in enumerate(devices)):
                return placement
        raise UsageError(
            f"the action orders place the stages on devices {list(devices)}, which is neither a loop nor a V",
            hint="with K devices, stage s is on device s % K in a loop; in a V, on K - 1 - s % K if s // K is odd",
        )

    @cached_property
    def num_micro_batches(self) -> int:
        """Number of micro-batches (M); 0 if there are no action orders yet."""
        return len({action.micro_batch for row in self.rows for action in row})

    @property
    def order_texts(self) -> tuple[str, ...]:
        """Action order of each device as text."""
        return format_orders(self.rows)

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return the actions of the device for the first `micro_batches` micro-batches."""
        return tuple(action for action in self.rows[device] if action.micro_batch < micro_batches)

    def check_supported(self, num_devices: int, micro_batches: int, chunks: int) -> None:
        """Raise UsageError if the action orders are for other numbers of devices, micro-batches or chunks."""
        super().check_supported(num_devices, micro_batches, chunks)
        stages = {action.stage for row in self.rows for action in row}
        numbers = len(self.rows), self.num_micro_batches, len(stages)
        if numbers != (num_devices, micro_batches, num_devices * chunks):
            raise UsageError(
                f"the action orders are for {numbers[0]} devices, {numbers[1]} micro-batches and {numbers[2]} stages, "
                f"the pipeline has {num_devices}, {micro_batches} and {num_devices * chunks}",
                hint="solve again",
            )


def parse_orders(texts: Sequence[str]) -> tuple[tuple[Action, ...], ...]:
    """Return the action orders that a plan stores as text.

    Raises:
        UsageError: A word is not an action.
    """
    rows = []
    for device, text in enumerate(texts):
        row = []
        for word in text.split():
            action = Action.from_text(word)
            if action is None:
                raise UsageError(
                    f"device {device} has `{word[:40]}` in its action order, which is not an action",
                    hint="an action is the stage, one of F, B, I and W, and the micro-batch: `2F0`",
                )
            row.append(action)
        rows.append(tuple(row))
    return tuple(rows)


def format_orders(rows: Sequence[Sequence[Action]]) -> tuple[str, ...]:
    """Return the action orders as text; `parse_orders` reads them back."""
    return tuple(" ".join(map(str, row)) for row in rows)

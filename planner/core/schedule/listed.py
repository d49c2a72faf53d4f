"""A schedule that was made for one pipeline: it is the lists themselves, and runs nothing else.

A plan keeps them as text, a line per device, in the words of torch's schedule files: `0F0 0F1 0I0 0W0`.
"""

from collections.abc import Sequence
from functools import cached_property

from planner.core.errors import UsageError
from planner.core.schedule.base import Action, Schedule
from planner.core.schedule.program import devices_of
from planner.core.values.placement import Placement, device_of


class Listed(Schedule):
    """What every device does, as it was found for one pipeline.

    Args:
        rows: Per device, its actions in order; without any it is a name that says nothing yet.
        meant_for: Where it will have the stages, as long as it has no lists.
    """

    name = "search"
    title = "searched schedule"
    torch_name = ""
    is_chunked = True

    def __init__(self, rows: tuple[tuple[Action, ...], ...] = (), *, meant_for: Placement = "loop") -> None:
        self.rows = rows
        self._meant_for = meant_for
        self.is_to_be_made = not rows

    def __eq__(self, other: object) -> bool:
        """Whether the lists are the same, or will be of the same placement."""
        return isinstance(other, Listed) and (self.rows, self._meant_for) == (other.rows, other._meant_for)

    def __hash__(self) -> int:
        """Equal for equal lists."""
        return hash((self.rows, self._meant_for))

    @cached_property
    def splits_backward(self) -> bool:  # type: ignore[override]
        """Whether any backward runs in halves, or may, as long as there are no lists."""
        return not self.rows or any(action.kind == "W" for row in self.rows for action in row)

    @property
    def exact_chunks(self) -> int | None:  # type: ignore[override]
        """Two arms of a V, as long as there are no lists."""
        return 2 if not self.rows and self._meant_for == "v" else None

    @cached_property
    def placement(self) -> Placement:  # type: ignore[override]
        """Where the lists have the stages.

        Raises:
            UsageError: Neither a loop nor a V has them so.
        """
        if not self.rows:
            return self._meant_for
        devices, num_devices = devices_of(self.rows), len(self.rows)
        for placement in ("loop", "v"):
            if all(device_of(s, num_devices, placement) == device for s, device in enumerate(devices)):
                return placement
        raise UsageError(
            f"the lists have the stages on the devices {list(devices)}, which is neither a loop nor a V",
            hint="stage v K + d belongs on device d, or, of every second chunk v, on device K - 1 - d",
        )

    @cached_property
    def num_micro_batches(self) -> int:
        """M; 0 as long as there are no lists."""
        return len({action.micro_batch for row in self.rows for action in row})

    @property
    def texts(self) -> tuple[str, ...]:
        """The lists as text."""
        return texts_of(self.rows)

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """The list of the device; of fewer micro-batches, as a last mini-batch may have them, what there is."""
        return tuple(action for action in self.rows[device] if action.micro_batch < micro_batches)

    def refuse(self, num_devices: int, micro_batches: int, chunks: int) -> None:
        """Raises where the lists are of another pipeline."""
        super().refuse(num_devices, micro_batches, chunks)
        stages = {action.stage for row in self.rows for action in row}
        numbers = len(self.rows), self.num_micro_batches, len(stages)
        if numbers != (num_devices, micro_batches, num_devices * chunks):
            raise UsageError(
                f"the lists are for {numbers[0]} devices, {numbers[1]} micro-batches and {numbers[2]} stages, "
                f"the pipeline has {num_devices}, {micro_batches} and {num_devices * chunks}",
                hint="solve again",
            )


def lists_of(texts: Sequence[str]) -> tuple[tuple[Action, ...], ...]:
    """The lists that a plan has as text.

    Raises:
        UsageError: A word is no action.
    """
    rows = []
    for device, text in enumerate(texts):
        row = []
        for word in text.split():
            action = Action.from_text(word)
            if action is None:
                raise UsageError(
                    f"device {device} has `{word[:40]}` in its list, which is no action",
                    hint="an action is the stage, one of F, B, I and W, and the micro-batch: `2F0`",
                )
            row.append(action)
        rows.append(tuple(row))
    return tuple(rows)


def texts_of(rows: Sequence[Sequence[Action]]) -> tuple[str, ...]:
    """The lists as a plan has them; `lists_of` reads them back."""
    return tuple(" ".join(map(str, row)) for row in rows)

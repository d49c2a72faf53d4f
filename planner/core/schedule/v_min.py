"""V-Min: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory, arXiv:2405.15362): a third of 1F1B's memory.

    K = 3, M = 3, stages 0 and 5, 1 and 4, 2 and 3
    device 0: 0F0 0F1 0F2 5F0 5I0 5W0 5F1 5I1 0I0 0W0 5W1 5F2 5I2 0I1 0W1 5W2 0I2 0W2
    device 1: 1F0 1F1 4F0 4F1 4I0 4W0 1F2 1I0 1W0 4I1 4W1 4F2 1I1 4I2 1W1 4W2 1I2 1W2
    device 2: 2F0 3F0 2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2

Micro-batches and gradients pass down and up the V without a pause, so that devices store them as briefly as possible.
If F, I and W differ in length, devices wait for each other at every micro-batch.
"""

from planner.core.schedule.building_block import BuildingBlockSchedule, PassStartTimes


class VMin(BuildingBlockSchedule):
    """Zero-bubble schedule with stages placed as a V; a third of the memory and two thirds of the bubble of 1F1B."""

    name = "v-min"
    title = "V-Min"

    def pass_start_times(self, device: int, num_devices: int) -> PassStartTimes:
        """Return the start times of the first micro-batch's passes on a device."""
        # If K is a multiple of 3, gradients come two units later; otherwise they would collide with forwards of other
        # micro-batches on the device.
        late = 0 if num_devices % 3 else 2
        return PassStartTimes(
            forward_down=device,
            forward_up=2 * num_devices - device - 1,
            backward_up=2 * num_devices + late + device,
            backward_down=4 * num_devices + late - device - 1,
        )

    def max_stored_micro_batches(self, num_devices: int) -> int:
        return 2 * ((num_devices + 4) // 3)

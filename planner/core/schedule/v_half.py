"""V-Half: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory, arXiv:2405.15362): half of 1F1B's memory.

    K = 2, M = 3, stages 0 and 3, 1 and 2
    device 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 0W0 3W1 3F2 3I2 0I1 0W1 0I2 3W2 0W2
    device 1: 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

F, I and W take one unit of time each. On the way from device 0 to K-1, a micro-batch starts two units later on each
next device; on the way back, one unit later. Its gradient visits the devices in the same order, with the same delays.
The longer a micro-batch stays with a device's first stage, the shorter it stays with the second. So devices need equal
memory.
"""

from planner.core.schedule.building_block import BuildingBlockSchedule, PassStartTimes


class VHalf(BuildingBlockSchedule):
    """Zero-bubble schedule with stages placed as a V; it has half of the memory and half of the bubble of 1F1B."""

    name = "v-half"
    title = "V-Half"

    def pass_start_times(self, device: int, num_devices: int) -> PassStartTimes:
        """Return the start times of the first micro-batch's passes on a device."""
        # If K is even, gradients come three units later; otherwise they would collide with forwards on the device.
        late = 0 if num_devices % 2 else 3
        return PassStartTimes(
            forward_down=2 * device,
            forward_up=3 * num_devices - device - 2,
            backward_up=3 * num_devices + late + 2 * device - 1,
            backward_down=6 * num_devices + late - device - 2,
        )

    def max_stored_micro_batches(self, num_devices: int) -> int:
        return 2 * ((num_devices + 2) // 2)

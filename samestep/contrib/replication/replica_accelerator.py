"""Accelerate's `Accelerator` of a replica, which knows nothing of the others."""

from typing import Any

from accelerate import Accelerator


class ReplicaAccelerator(Accelerator):
    """Accelerate's `Accelerator` of a replica of several (--fault_tolerance step).

    Accelerate knows the processes of this replica only, so that nothing is divided by the number of replicas, which add their
    gradients up.

    Attributes:
        is_main_process: whether it writes what a run writes; set from step to step.
    """

    is_main_process = True

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.is_main_process = self.process_index == 0  # until replicas have met

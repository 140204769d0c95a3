"""The samples of a step, which the replicas tell each other before they compute it."""

import numpy as np
import torch

from samestep.contrib.replication.connection import Connection, Place
from samestep.data.steps import StepData, Steps
from samestep.errors import RunError


class RollCall:
    """The counts and samples of the present step, of all replicas."""

    def __init__(self, connection: Connection, steps: Steps):
        self.connection, self.steps = connection, steps
        self.pairs = np.zeros((0, 2), np.int64)  # (epoch, sample), of one process after the other

    def count(self, data: StepData, place: Place) -> torch.Tensor | None:
        """Add up the counts of the step, and check that all replicas together have each of its samples once.

        Returns:
            int64 [terms]; None: a replica was lost.
        """
        num_terms, device = len(data.counts), self.connection.device
        own = np.array([sample for samples in data.samples for sample in samples], np.int64).reshape(-1, 2)
        offset = sum(sum(sizes) for sizes in data.sizes[: place.rank])
        numbers = torch.zeros(num_terms + 2 * data.num_samples, dtype=torch.int64)
        numbers[:num_terms] = data.counts
        numbers[num_terms:].view(-1, 2)[offset : offset + len(own)] = torch.from_numpy(own)
        numbers = numbers.to(device)
        if not self.connection.add_up(numbers):
            return None
        pairs = numbers[num_terms:].view(-1, 2).cpu().numpy()
        expected_pairs = np.stack(self.steps.order.samples(data.step), 1)
        if not np.array_equal(pairs[np.lexsort(pairs.T)], expected_pairs[np.lexsort(expected_pairs.T)]):
            raise RunError(
                f"step {data.step + 1}: the replicas' parts are not each sample of the step once. Start all replicas with the "
                "same version of this program"
            )
        self.pairs = pairs
        return numbers[:num_terms]

    def list_parts(self, data: StepData) -> tuple[list[tuple[int, int]], list[list[tuple[int, int]]]]:
        """List (process, number) and the samples of each micro-batch of all replicas, as they told them before the step.

        Of a replica of several processes the first one lists them for all.
        """
        if self.connection.processes.rank > 0:
            return [], []
        places = [(process, number) for process, sizes in enumerate(data.sizes) for number in range(len(sizes))]
        ends = np.cumsum([size for sizes in data.sizes for size in sizes])
        return places, [[tuple(pair) for pair in part.tolist()] for part in np.split(self.pairs, ends)[:-1]]

"""The state that replicas have in common: parameters, optimizer, and all else that a checkpoint holds."""

import hashlib
import json
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from samestep.contrib.replication.gradients import to_local
from samestep.contrib.replication.shared_folder import SharedFolder
from samestep.errors import UsageError
from samestep.step.exact_sum import ExactSum
from samestep.training import checkpoint, digest
from samestep.training.recovery import Recovery


class SharedState:
    """The state that a replica gets from another one, when it is behind: also evaluations of the log, and lines of the folder.

    What is trained is decided by `identity`; messages name the `lighthouse`, where the replicas meet.
    """

    def __init__(
        self,
        recovery: Recovery,
        folder: SharedFolder,
        exact_sum: ExactSum | None,
        identity: tuple[Any, ...],
        lighthouse: str | None,
    ):
        self.recovery, self.folder, self.exact_sum = recovery, folder, exact_sum
        self.model, self.optimizer, self.log = recovery.model, recovery.optimizer, recovery.log
        self.frozen, self.lighthouse = checkpoint.find_frozen(self.model), lighthouse
        self.fingerprint = shorten_digest(repr(identity))

    def list_tensors(self) -> dict[str, torch.Tensor]:
        """List this process's parts of parameters and buffers, frozen ones left out."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: to_local(tensor.detach()) for name, tensor in named if name not in self.frozen}

    def digest_parameters(self) -> int:
        """Digest the parameters, 56 bits: replicas that go on together have the same ones."""
        return shorten_digest("".join(map(digest.digest_tensor, self.list_tensors().values())))

    def get(self) -> dict[str, Any]:
        """Return all that a replica needs that is behind: what a checkpoint holds, and what is not in the files yet."""
        record = {
            "fingerprint": self.fingerprint,
            "log": self.log.share() | {"lines": self.folder.share()},
            "exponent": None if self.exact_sum is None else self.exact_sum.last_exponent,
        }
        optimizer = to_local(self.optimizer.optimizer.state_dict())
        return {"tensors": self.list_tensors(), "optimizer": optimizer, "record": json.dumps(record)}

    @torch.no_grad()
    def set(self, state: dict[str, Any], step: int) -> None:
        """Become what another replica is after `step` steps.

        Raises:
            UsageError: it trains something else.
        """
        record, tensors = json.loads(state["record"]), self.list_tensors()
        if record["fingerprint"] != self.fingerprint or tensors.keys() != state["tensors"].keys():
            raise UsageError(
                f"fault_tolerance is step, but the replicas at {self.lighthouse} train something else. Give this one "
                "the same recipe, data, precision and --reproducible, or a lighthouse of its own"
            )
        for name, tensor in tensors.items():
            tensor.copy_(state["tensors"][name])
        self.optimizer.optimizer.load_state_dict(self._divide(state["optimizer"]))
        checkpoint.lay_out_as_parameters(self.optimizer)
        if self.exact_sum is not None:
            self.exact_sum.last_exponent = record["exponent"]
        self.log.join(record["log"], step)
        self.folder.take_over(record["log"]["lines"])
        self.recovery.saver.abandoned_folders = []  # those in the folder are of the run that is joined

    def _divide(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make moments that are this process's parts into parts of divided tensors, as their parameters are."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        moments_of_all = {}
        for number, moments in state["state"].items():
            parameter = parameters[number]
            if isinstance(parameter, DTensor):
                part, layout = parameter.to_local(), (parameter.device_mesh, parameter.placements)
                whole = {"shape": parameter.shape, "stride": parameter.stride()}
                moments = {
                    name: DTensor.from_local(value.to(part.device), *layout, **whole)
                    if value.shape == part.shape
                    else value
                    for name, value in moments.items()
                }
            moments_of_all[number] = moments
        return state | {"state": moments_of_all}


def shorten_digest(text: str) -> int:
    """Shorten the SHA-256 of a text to its first 56 bits, which fit in an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

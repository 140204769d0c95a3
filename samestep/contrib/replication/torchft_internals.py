"""One replica of torchft: its manager, and state that goes to another replica without any code in it."""

import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist


def make_manager(
    lighthouse: str,
    device: torch.device,
    process_index: int,
    num_processes: int,
    store_address: tuple[str, int],
    timeout: float,
    connect_timeout: float,
    quorum_timeout: float,
    min_replicas: int,
    get_state: Callable[[], Any],
    set_state: Callable[[Any], None],
    on_new_group: Callable[[], None],
) -> Any:
    """Make torchft's `Manager` of one of the processes of a replica.

    torchft 0.2.0: `HTTPTransport` unpickles what a replica sends, and so would run its code; its class method
    `_load_from_address` is replaced by one that reads tensors and plain values only. It tells other replicas the host's name as
    its address, which not every network knows; here it is the address from which the lighthouse is reached. Its server
    (`_server`) prints a line for each request; here it does not.

    Args:
        lighthouse: http://HOST:PORT.
        device: of the gradients: gloo reduces those on a CPU, NCCL others.
        process_index, num_processes: of the replica.
        store_address: host and port of the replica's store; see `open_store`.
        timeout: seconds that a collective, or a state on its way, may take.
        connect_timeout: seconds to connect to the lighthouse or a replica.
        quorum_timeout: seconds to wait for a quorum.
        min_replicas: see `Manager`.
        get_state, set_state: of the training, for replicas that are behind.
        on_new_group: called when the replicas are others.

    Raises:
        RuntimeError: the lighthouse does not answer.
    """
    os.environ.setdefault("RUST_LOG", "error")  # torchft's Rust part would write several lines in every step
    import torchft
    from torchft.checkpointing import HTTPTransport

    for name in ("torchft.manager", "torchft.checkpointing.http_transport"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each error is handled, and told in a line of ours
    group_class: Any = torchft.ProcessGroupGloo if device.type == "cpu" else torchft.ProcessGroupNCCL

    class Group(group_class):
        def configure(self, *arguments: Any, **keywords: Any) -> None:
            on_new_group()
            super().configure(*arguments, **keywords)

    local_address = find_local_address(lighthouse)

    class Transport(HTTPTransport):
        @classmethod
        def _load_from_address(cls, address: str, timeout: timedelta) -> Any:
            return load_state(address, timeout.total_seconds())

        def __init__(self, **keywords: Any):
            super().__init__(**keywords)
            self._server.RequestHandlerClass.log_message = lambda *_: None

        def address(self) -> str:
            return f"http://{local_address}:{urlsplit(super().address()).port}/checkpoint/"

    seconds = timedelta(seconds=timeout)
    return torchft.Manager(
        pg=Group(timeout=seconds),
        state_dict=get_state,
        load_state_dict=set_state,
        min_replica_size=min_replicas,
        use_async_quorum=False,
        timeout=seconds,
        quorum_timeout=timedelta(seconds=quorum_timeout),
        connect_timeout=timedelta(seconds=connect_timeout),
        rank=process_index,
        world_size=num_processes,
        store_addr=store_address[0],
        store_port=store_address[1],
        lighthouse_addr=lighthouse,
        replica_id=f"{socket.gethostname()}-{os.getpid()}",
        hostname=local_address,
        checkpoint_transport=Transport(timeout=seconds, num_chunks=0),
    )


def open_store(lighthouse: str) -> tuple[dist.TCPStore, tuple[str, int]]:
    """Open the store of a replica, by which its processes and other replicas find each other; it must live as long.

    Returns:
        The store; its host and port.
    """
    host = find_local_address(lighthouse)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, (host, store.port)


def find_local_address(lighthouse: str) -> str:
    """Find the address of this machine from which a lighthouse http://HOST:PORT is reached; nothing is sent."""
    host, port = urlsplit(lighthouse).hostname or "", urlsplit(lighthouse).port or 0
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def is_reachable(lighthouse: str) -> bool:
    """Tell whether anybody listens at an address http://HOST:PORT."""
    try:
        socket.create_connection((urlsplit(lighthouse).hostname, urlsplit(lighthouse).port), timeout=5).close()
    except OSError:
        return False
    return True


def load_state(address: str, timeout: float) -> Any:
    """Read what a replica serves: tensors and plain values; anything else is an error, and is not run.

    torch 2.13, `torch.distributed._serialization._streaming_load`: the reading end of what torchft sends.
    """
    import urllib.request
    import warnings

    from torch.distributed._serialization import _streaming_load

    with warnings.catch_warnings(), urllib.request.urlopen(address, timeout=timeout) as stream:
        warnings.simplefilter("ignore", UserWarning)  # tensors are read into buffers that are not writable
        return _streaming_load(stream, weights_only=True)


def set_step(manager: Any, step: int) -> None:
    """Let a manager begin at a step: torchft 0.2.0, `load_state_dict`, which is documented for checkpoints."""
    manager.load_state_dict({"step": step, "batches_committed": 0})

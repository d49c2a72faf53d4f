"""The key-value store that all processes of a job share."""

import os
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["job_store"]


def job_store(timeout: timedelta) -> Store:
    """The launcher's store, or where it has none, one that the first rank holds.

    `torchrun --standalone` keeps its store when it starts the processes again (torch 2.13). They would find the
    addresses of those that are gone, so each start has keys of its own.

    Args:
        timeout: For being found, and for whatever is asked of it.
    """
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=not by_launcher and os.environ["RANK"] == "0",
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    return PrefixStore(f"gpipe-plan/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

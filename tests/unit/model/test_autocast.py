"""Autocast's cache of low-precision weight copies."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.model import autocast
from planner.model.autocast import weight_cast_cache

CPU = torch.device("cpu")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("prepared", [True, False])
def test_recomputation_in_a_prepared_thread_keeps_cached_copies(
    *, use_reentrant: bool, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backwards of a GPU run in a thread of their own; on a CPU, in the thread that calls `backward`."""
    cleared: list[bool] = []
    layer, value = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    def backward(loss: Tensor) -> None:
        if prepared:
            autocast._keep_casts_in_backwards.__wrapped__(CPU)
        loss.backward()

    with ThreadPoolExecutor(max_workers=1) as device_thread, weight_cast_cache("bf16-mixed", CPU):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = checkpoint(layer, value, use_reentrant=use_reentrant)
        monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(True))
        device_thread.submit(backward, result.float().sum()).result()
        assert layer.weight.grad is not None
        assert bool(cleared) is not prepared

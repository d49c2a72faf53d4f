"""Plans of other planners, judged by our cost model: the event simulator for time, the memory law for what fits.

Nothing of theirs is copied: they are imported from where they are installed, and left out where they are not. To be
generous, they get our M, the cheapest recomputation per stage that fits, and links that cost nothing, as none of them
knows of any of these.
"""

import contextlib
import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from chains import Chain, FloatArray
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.memory import peak_bytes_of_stages, stage_memory
from planner.core.cost.partition import Partition
from planner.core.cost.peak_points import stage_peak_points
from planner.core.schedule import GPIPE
from planner.core.values.cluster import Cluster
from planner.core.values.plan import Recompute

__all__ = ["MIN_MAX", "Peer", "installed_peers", "judge", "smallest_cap"]

CHOICES: tuple[Recompute, ...] = ("never", "except-last", "always")
Balance = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another planner."""

    name: str
    balances: Callable[[Chain, int], Sequence[Balance]]
    """Its cuts of a chain into K stages: more than one where it leaves a choice, of which the best counts."""


def installed_peers() -> tuple[list[Peer], list[str]]:
    """Return the planners that can be imported here, and the names of the packages that cannot."""
    peers, missing = [], []
    torchgpipe, deepspeed = _imported("torchgpipe.balance.blockpartition"), _imported("deepspeed.runtime.utils")
    if torchgpipe is None:
        missing.append("torchgpipe")
    else:
        peers += [
            Peer(name="torchgpipe by time", balances=_torchgpipe(torchgpipe, lambda chain: chain.pair_us)),
            Peer(name="torchgpipe by size", balances=_torchgpipe(torchgpipe, _size)),
        ]
    if deepspeed is None:
        missing.append("deepspeed")
    else:
        peers += [
            Peer(name="DeepSpeed `uniform`", balances=_deepspeed_uniform(deepspeed)),
            Peer(name="DeepSpeed `parameters`", balances=_deepspeed(deepspeed, _trained_parameters)),
            # Not one of its methods (`profile` is not implemented): its partition function, fed with times.
            Peer(name="DeepSpeed, fed times", balances=_deepspeed(deepspeed, lambda chain: chain.pair_us)),
        ]
    return peers, missing


def _imported(module: str) -> Any:
    # DeepSpeed prints what it thinks of the machine.
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module(module)
    except ImportError:
        return None


def _size(chain: Chain) -> FloatArray:
    # As its `balance_by_size` weighs a layer, with the parameter scale that its documentation gives for the optimizer.
    return np.maximum(chain.saved, chain.output) + (2 + chain.optimizer_share) * chain.parameters


def _trained_parameters(chain: Chain) -> FloatArray:
    # Its count leaves frozen ones out.
    return chain.parameters * chain.trained / 4


def _torchgpipe(module: Any, weights: Callable[[Chain], FloatArray]) -> Callable[[Chain, int], list[Balance]]:
    def balances(chain: Chain, num_stages: int) -> list[Balance]:
        blocks = module.solve([int(weight) for weight in weights(chain)], num_stages)
        return [tuple(len(block) for block in blocks)]

    return balances


def _deepspeed(module: Any, weights: Callable[[Chain], FloatArray]) -> Callable[[Chain, int], list[Balance]]:
    return lambda chain, num_stages: [_lengths(module.partition_balanced(weights(chain).tolist(), num_stages))]


def _deepspeed_uniform(module: Any) -> Callable[[Chain, int], list[Balance]]:
    return lambda chain, num_stages: [_lengths(module.partition_uniform(chain.num_layers, num_stages))]


def _lengths(cuts: Sequence[int]) -> Balance:
    return tuple(int(end - first) for first, end in pairwise(cuts))


def _min_max(chain: Chain, num_stages: int) -> list[Balance]:
    before = np.concatenate([[0.0], np.cumsum(chain.pair_us)])
    sums = before[None, :] - before[:, None]
    return [_evenest(sums, num_stages, last=last)[1] for last in (False, True)]


MIN_MAX = Peer(name="exact min-max of F+B", balances=_min_max)
"""Not a package: the smallest possible largest stage, the best that any planner of F+B sums aims at."""


def judge(costs: ChainCosts, balance: Balance, *, micro_batches: int, cap_bytes: int) -> float | None:
    """Return the simulated step time of these cuts in microseconds, or None if a stage never fits."""
    balance = tuple(length for length in balance if length)  # an empty stage is no stage
    recompute = []
    for first, end in pairwise(np.cumsum([0, *balance]).tolist()):
        fits = [choice for choice in CHOICES if _stage_bytes(costs, first, end, micro_batches, choice) <= cap_bytes]
        if not fits:
            return None
        recompute.append(fits[0])
    partition = Partition(schedule="gpipe", micro_batches=micro_batches, balance=balance, recompute=tuple(recompute))
    evaluation = Evaluation(costs, partition, Cluster(memory_bytes=(cap_bytes,) * len(balance)))
    return max(event.end_us for event in evaluation.events) + evaluation.optimizer_delay_us


def _stage_bytes(costs: ChainCosts, first: int, end: int, micro_batches: int, recompute: Recompute) -> int:
    memory = stage_memory(costs, first, end, stage_peak_points(GPIPE, micro_batches=micro_batches), recompute=recompute)
    return memory.total


def smallest_cap(costs: ChainCosts, num_devices: int, *, micro_batches: int) -> int:
    """Return the smallest memory limit with which some plan of at most K stages fits."""
    num, firsts = costs.num_layers, np.arange(costs.num_layers)
    need = np.full((num + 1, num + 1), np.inf)
    points = stage_peak_points(GPIPE, micro_batches=micro_batches)
    for total in peak_bytes_of_stages(costs, firsts, slice(0, num), points, choices=CHOICES):
        need[:-1, 1:] = np.minimum(need[:-1, 1:], total)
    return int(min(_evenest(need, k, last=False)[0] for k in range(1, num_devices + 1)))


def _evenest(need: NDArray[np.float64], num_stages: int, *, last: bool) -> tuple[float, Balance]:
    """Return the smallest possible maximum of `need[i, j]` over stages i..j-1, with the leftmost or rightmost cuts."""
    num = need.shape[0] - 1
    need = np.where(np.tri(num + 1, dtype=bool), np.inf, need)
    best = np.where(np.arange(num + 1) == 0, -np.inf, np.inf)
    cuts = []
    for _ in range(num_stages):
        largest = np.maximum(best[:, None], need)
        cuts.append(num - largest[::-1].argmin(axis=0) if last else largest.argmin(axis=0))
        best = largest.min(axis=0)
    ends = [num]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return float(best[num]), _lengths(ends[::-1])

"""Tensor parallelism and sharded optimizers: profiles for one width (GPUs that share each layer) and replica count.

Each device of a plan is a group of T GPUs that share every layer. For a given T, this module returns a profile in which
the times of layers include the collectives within a group. `Inputs.cluster_of_groups` returns a cluster whose devices
are groups. Other modules can therefore treat a group as one device.

In a forward, the GPUs of a group all-reduce the results of a layer. In a backward, they all-reduce its input gradients
(Shoeybi et al., "Megatron-LM", arXiv:1909.08053). A ring moves 2 (T-1)/T of the bytes over the link of each GPU
(Patarasuk and Yuan, 2009). The latency of the link counts once per all-reduce, not per hop.

If R replicas shard the optimizer (Rajbhandari et al., "ZeRO", arXiv:1910.02054, stage 1; the "distributed optimizer"
of Megatron-LM), each replica has 1/R of the optimizer state and takes 1/R of the optimizer's time. The replicas sum
gradients by a reduce-scatter, and get updated parameters by an all-gather. If a parameter has no more bytes than its
gradient, these two collectives move as many bytes as the all-reduce of gradients without sharding.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from typing import Final

from planner.core.cost.costs import CostTable
from planner.core.errors import UsageError
from planner.core.values.cluster import Cluster, Link
from planner.core.values.plan import Inputs
from planner.core.values.profile import LayerProfile, Profile, WidthCosts
from planner.core.values.units import pluralize


def collectives_us(size_bytes: float, count: int, tensor_parallel: int, link: Link) -> float:
    """Return the time of a layer's all-reduces in the forward or in the backward of a micro-batch, in microseconds.

    Args:
        size_bytes: Bytes of these all-reduces, summed.
        count: Number of all-reduces.
        tensor_parallel: Number of GPUs that share each layer.
        link: Link within a node.
    """
    if tensor_parallel == 1:
        return 0.0
    moved_bytes = 2 * (tensor_parallel - 1) / tensor_parallel * size_bytes
    return count * link.latency_us + replace(link, latency_us=0.0).transfer_us(moved_bytes)


def tensor_parallel_widths(profile: Profile) -> tuple[int, ...]:
    """Return the tensor-parallel widths (GPUs that share each layer) for which the profile has costs, ascending."""
    return tuple(sorted(layers_by_width(profile)))


def tensor_parallel_profile(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile for one tensor-parallel width: the number of GPUs per device of `cluster`.

    Times of the result include the all-reduces among the GPUs that share each layer. If replicas shard the optimizer,
    each layer has the optimizer costs of one replica.

    Raises:
        UsageError: The profile has no costs for the width.
    """
    width, layers = cluster.tensor_parallel, layers_by_width(profile)
    if width not in layers:
        raise UsageError(_missing(width), hint=f"also profile with {width} GPUs that share each layer, and solve again")
    # The optimizer is sharded among replicas with the same experts.
    shards = max(1, cluster.optimizer_shards // profile.expert_parallel)
    priced = tuple(_with_shard(_with_collectives(layer, cluster=cluster), shards) for layer in layers[width])
    if priced == profile.layers and not profile.widths:
        return profile
    return replace(profile, tensor_parallel=width, layers=priced, widths=())


def usable_tensor_parallel_widths(profile: Profile, inputs: Inputs) -> tuple[int, ...]:
    """Return the tensor-parallel widths (GPUs that share each layer) that a request allows, ascending; at least one.

    Raises:
        UsageError: No width is possible, or the link within a node is unknown.
    """
    widths = (inputs.tensor_parallel,) if inputs.tensor_parallel else tensor_parallel_widths(profile)
    problems = {width: _width_problem(profile, inputs, width) for width in widths}
    usable = tuple(width for width, problem in problems.items() if not problem)
    if not usable:
        listed = ", ".join(map(str, tensor_parallel_widths(profile)))
        raise UsageError(next(iter(problems.values())), hint=f"the profile has costs for `--tensor-parallel` {listed}")
    layers = layers_by_width(profile)
    unpriced = [w for w in usable if w > 1 and any(each.collectives or each.collective_bytes for each in layers[w])]
    if unpriced and inputs.link == Link():
        alone = ", or `--tensor-parallel 1`" if usable[0] == 1 else ""
        raise UsageError(
            f"{unpriced[0]} GPUs that share layers sum their results, but the link within a node is unknown",
            hint=f"give it: `--link 450GB/s,5us`{alone}",
        )
    return usable


def merge_tensor_parallel_profiles(profiles: Mapping[str, Profile]) -> Profile:
    """Return one profile with the layer costs of several profiles, which differ in their tensor-parallel widths.

    Args:
        profiles: Profiles of one model by file name, which error messages quote. No two have a width in common.

    Returns:
        Profile of the smallest width, with the costs at the other widths in `Profile.widths`.

    Raises:
        UsageError: Two profiles differ in more than the width, or have the same width.
    """
    ordered = sorted(profiles.items(), key=lambda item: item[1].tensor_parallel)
    (name, first), *others = ordered
    widths = list(first.widths)
    for other_name, other in others:
        differs = next((what for what, of in _SAME.items() if of(first) != of(other)), "")
        if differs:
            raise UsageError(
                f"the profiles `{name}` and `{other_name}` cannot be merged: they differ in {differs}",
                hint="profiles to merge differ only in the number of GPUs that share each layer (`tensor_parallel`)",
            )
        widths += [WidthCosts(tensor_parallel=other.tensor_parallel, layers=other.layers), *other.widths]
    counts = [first.tensor_parallel, *(width.tensor_parallel for width in widths)]
    twice = next((count for n, count in enumerate(counts) if count in counts[:n]), None)
    if twice is not None:
        raise UsageError(
            f"two of the profiles are for {pluralize(twice, 'GPU')} per layer (`tensor_parallel`)",
            hint="name one profile for each number of GPUs per layer",
        )
    return replace(first, widths=tuple(sorted(widths, key=lambda width: width.tensor_parallel)))


_SAME: Final[Mapping[str, Callable[[Profile], object]]] = {
    "their layers": lambda profile: [layer.name for layer in profile.layers],
    "micro-batch sizes": lambda profile: profile.micro_batch_sizes,
    "device": lambda profile: (profile.device.kind, profile.device.name, profile.device.how),
    "optimizer": lambda profile: (profile.optimizer, profile.optimizer_peak),
    "precision": lambda profile: profile.environment.dtype,
    "the division of experts": lambda profile: profile.expert_parallel,
    "model": lambda profile: (profile.model.source, profile.model.parameters, profile.model.inputs),
    "settings": lambda profile: {**profile.model.settings, "tensor_parallel": None},
}
"""Properties in which profiles of different widths must be equal."""


def map_layers(profile: Profile, change: Callable[[LayerProfile], LayerProfile]) -> Profile:
    """Return the profile with `change` applied to every layer, for every tensor-parallel width."""
    widths = tuple(replace(width, layers=tuple(map(change, width.layers))) for width in profile.widths)
    return replace(profile, layers=tuple(map(change, profile.layers)), widths=widths)


class CostTablesByWidth:
    """Cost tables of a profile, one for each tensor-parallel width, computed on first use."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._tables: dict[tuple[int, int, Link, float], CostTable] = {}

    def at(self, cluster: Cluster) -> CostTable:
        """Return the cost table for the tensor-parallel width of `cluster`.

        Raises:
            UsageError: The profile has no costs for this width.
        """
        key = cluster.tensor_parallel, cluster.optimizer_shards, cluster.link, cluster.speed(0)
        if key not in self._tables:
            self._tables[key] = CostTable(tensor_parallel_profile(self._profile, cluster))
        return self._tables[key]


def layers_by_width(profile: Profile) -> dict[int, tuple[LayerProfile, ...]]:
    """Return the layers of the profile, by tensor-parallel width."""
    return {profile.tensor_parallel: profile.layers, **{each.tensor_parallel: each.layers for each in profile.widths}}


def _with_collectives(layer: LayerProfile, *, cluster: Cluster) -> LayerProfile:
    if cluster.tensor_parallel == 1 or not (layer.collectives or layer.collective_bytes):
        return layer
    sizes = layer.collective_bytes or (0,) * len(layer.forward_us)
    # Stage times are divided by the speed, but a faster device does not make links faster.
    more_us = [
        cluster.speed(0) * collectives_us(size, layer.collectives, cluster.tensor_parallel, cluster.link)
        for size in sizes
    ]

    def plus(times_us: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(time + more for time, more in zip(times_us, more_us, strict=True)) if times_us else ()

    return replace(
        layer,
        forward_us=plus(layer.forward_us),
        backward_us=plus(layer.backward_us),
        backward_input_us=plus(layer.backward_input_us),
        collective_bytes=(),
        collectives=0,
    )


def _with_shard(layer: LayerProfile, shards: int) -> LayerProfile:
    if shards == 1:
        return layer
    return replace(
        layer,
        optimizer_bytes=ceil(layer.optimizer_bytes / shards),
        optimizer_us=layer.optimizer_us / shards,
        optimizer_peak_bytes=ceil(layer.optimizer_peak_bytes / shards),
        optimizer_boundary_peak_bytes=ceil(layer.optimizer_boundary_peak_bytes / shards),
    )


def _width_problem(profile: Profile, inputs: Inputs, width: int) -> str:
    problems = {
        f"{pluralize(inputs.devices, 'GPU')} cannot be a group of {width} that share layers": width > inputs.devices,
        f"nodes of {pluralize(inputs.node_devices, 'GPU')} do not hold whole groups of {width}": inputs.node_devices
        % width,
        f"groups of {width} need GPUs that are all alike, got unequal limits or speeds": not inputs.are_devices_alike,
        f"`--links` has a link for every GPU, groups of {width} need `--link` and `--inter-link`": inputs.links,
    }
    if width not in tensor_parallel_widths(profile):
        return _missing(width)
    return next((problem for problem, is_true in problems.items() if is_true and width > 1), "")


def _missing(width: int) -> str:
    return f"the profile has no costs for {width} GPUs that share each layer"

"""What the page computes with: costs of every layer at every micro-batch size, devices, links, and lists of actions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts, Tie, sums_before
from planner.core.cost.costs import CostTable
from planner.core.cost.evaluate import Partition
from planner.core.cost.layer_memory import cast_gradient_peaks, recomputed_levels
from planner.core.cost.planning import cluster_of
from planner.core.cost.waiting import staying_gradients
from planner.core.cost.weight_backward import weight_levels
from planner.core.schedule import KINDS
from planner.core.values.cluster import Link
from planner.core.values.plan import Plan
from planner.core.values.printable import printable
from planner.show.explore.lists import Menu
from planner.show.explore.question import Question
from planner.show.html.timeline import kinds_data

FloatArray = NDArray[np.float64]

_FLOWS: Final = ("F", "B")


def page_data(question: Question, menu: Menu) -> str:
    """The question as JSON for the scripts, fit to stand within a script element."""
    plan, profile = question.plan, question.profile
    table, batch = CostTable(profile), plan.inputs.batch // plan.replicas
    plain = {m: table.at(batch // m, extrapolate=plan.inputs.extrapolate) for m in question.micro_batches}
    by_count = {m: costs.of_replicas(plan.replicas) for m, costs in plain.items()}
    one = by_count[plan.micro_batches]
    data = {
        "kinds": [_kind(letter) for letter in KINDS],
        "timeline": kinds_data(),
        "names": [printable(layer.name) for layer in profile.layers],
        "replicas": plan.replicas,
        **_devices(plan, Partition.of(plan, one.names)),
        "traits": {
            "exact": one.exact,
            "peaks_add": one.optimizer_peaks_add,
            "halves_assumed": one.halves_assumed,
            "bucket_bytes": one.bucket_bytes,
        },
        "fixed": _fixed(one),
        "sizes": {m: _at_size(costs) for m, costs in by_count.items()},
        **_choices(question, menu),
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _kind(letter: str) -> dict[str, object]:
    kind = next(kind for kind in KINDS.values() if kind.letter == letter)
    flow, follows = (_FLOWS.index(way) if way is not None else -1 for way in (kind.flow, kind.follows))
    return {"letter": kind.letter, "direction": kind.direction, "flow": flow, "follows": follows}


def _devices(plan: Plan, partition: Partition) -> dict[str, object]:
    """The devices of a pipeline in its order, and what joins them."""
    cluster, num_devices = cluster_of(plan.inputs), plan.num_devices
    places = [partition.device_of(stage) for stage in range(num_devices)]
    links = [cluster.link_behind(d, num_devices=num_devices, replicas=plan.replicas) for d in range(num_devices)]
    return {
        "devices": num_devices,
        "places": places,
        "memory_bytes": plan.inputs.memory_bytes,
        "speeds": [cluster.speed(place) for place in places],
        "links": [[*_link(link), link.blocking] for link in links],
        "allreduce": None if cluster.allreduce is None else _link(cluster.allreduce),
        "overhead_us": cluster.overhead_us,
        "reserve_bytes": cluster.reserve_bytes,
    }


def _link(link: Link) -> list[float]:
    return [link.latency_us, link.bytes_per_s]


def _choices(question: Question, menu: Menu) -> dict[str, object]:
    """What there is to choose from, and what the plan chose."""
    plan = question.plan
    names = [each.schedule.name for each in menu.schedules]
    return {
        "schedules": [
            {
                "name": each.schedule.name,
                "title": each.schedule.title,
                "placement": each.schedule.placement,
                "splits": each.schedule.splits_backward,
                "knows_moments": each.schedule.has_known_moments,
                "is_own": bool(each.schedule.texts),
                "lists": each.lists,
            }
            for each in menu.schedules
        ],
        "start": {
            "schedule": names.index(plan.schedule),
            "chunks": plan.chunks,
            "micro_batches": plan.micro_batches,
            "balance": plan.balance,
        },
        # The page knows whole stages alone, and says so.
        "policy": "auto" if plan.inputs.recompute == "layers" else plan.inputs.recompute,
        "recompute": [stage.recompute for stage in plan.stages],
        "may_recompute": question.may_recompute,
        "step_us": plan.predicted.step_us,
        "command": question.command,
        "place": question.place,
        "caveats": question.caveats,
    }


# ---- costs


def _fixed(costs: ChainCosts) -> dict[str, object]:
    """What does not depend on the micro-batch size."""
    state = costs.state
    return {
        "optimizer_us": _short(costs.optimizer_us),
        "parameters": _short(state.parameters),
        "optimizer": _short(state.optimizer),
        "buffers": _short(state.buffers),
        "rewritten": _short(state.rewritten),
        "casts": _short(state.casts),
        "ties": [_tie(tie) for tie in costs.ties],
    }


def _tie(tie: Tie) -> dict[str, object]:
    return {
        "first": tie.first,
        "second": tie.second,
        "parameter_bytes": tie.parameter_bytes,
        "gradient_bytes": tie.gradient_bytes,
        "optimizer_bytes": tie.optimizer_bytes,
        "cast_bytes": tie.cast_bytes,
        "these_alone": tie.these_alone,
        "earlier": tie.earlier,
    }


def _at_size(costs: ChainCosts) -> dict[str, object]:
    """Return the costs at a micro-batch size; sums that end with a layer are taken to the end of the chain."""
    edge, levels = costs.boundaries, costs.levels
    arrays = {
        "forward_us": costs.forward_us,
        "backward_us": costs.backward_us,
        "input_us": costs.halves.input_us,
        "weight_us": costs.halves.weight_us,
        "gradients": costs.gradients,
        "has_backward": costs.has_backward.astype(float),
        "optimizer_peak": costs.state.optimizer_peak,
        "optimizer_boundary_peak": costs.state.optimizer_boundary_peak,
        "input": edge.input,
        "output": edge.output,
        "boundary_input_gradient": edge.input_gradient,
        "boundary_output_gradient": edge.output_gradient,
        "unsaved_output": edge.unsaved_output,
        "unkept_input": edge.unkept_input,
        "input_alive": edge.input_alive,
        "copied_input": edge.copied_input,
        "saved": levels.saved,
        "forward": levels.forward,
        "no_grad": levels.no_grad,
        "first_backward": levels.first_backward,
        "backward": levels.backward,
        "end_twice_first": levels.end_twice_first,
        "end_twice": levels.end_twice,
        "attributes": levels.attributes,
        "renewed": levels.renewed,
        "staying": staying_gradients(costs),
        **_halves(costs),
        **_copies(costs),
    }
    return {
        "size": costs.micro_batch_size,
        "target": costs.target,
        **{name: _short(values) for name, values in arrays.items()},
        "spans": _spans(costs),
        "relays": _relays(costs),
        "programs": _programs(costs),
    }


def _halves(costs: ChainCosts) -> Mapping[str, FloatArray]:
    """What is held and how high levels are where backwards run in halves."""
    halves, weights = costs.halves, weight_levels(costs)
    return {
        "half_held": halves.held,
        "weight_gradients": halves.weight_gradients,
        "input_gradients": np.maximum(costs.gradients - halves.weight_gradients, 0.0),
        "first_input": halves.first_input,
        "later_input": halves.input,
        "end_first_input": halves.first_input - halves.end_first_input,
        "end_input": halves.input - halves.end_input,
        "first_weight": weights.first,
        "weight": halves.weight,
        "weight_waiting": weights.waiting,
        "turning": weights.turning,
    }


def _copies(costs: ChainCosts) -> Mapping[str, FloatArray]:
    """What gradients of autocast's copies need; nothing without copies."""
    if not costs.state.casts.any():
        return {}
    level, through = recomputed_levels(costs)
    return {"cast_peaks": cast_gradient_peaks(costs), "cast_level": level, "cast_through": through}


def _spans(costs: ChainCosts) -> list[list[float]]:
    """The storages that pass by a layer: the first and the last one of these, and bytes by who keeps them."""
    storages = costs.storages
    by = (storages.kept_by_readers, storages.kept_by_maker, storages.kept_by_nobody)
    sizes = np.rint(np.stack(by, axis=1)) if len(storages.maker) else np.zeros((0, 3))
    begins, ends = (storages.maker + 1).tolist(), (storages.until - 1).tolist()
    return [
        [begin, end, *_plain(row)]
        for begin, end, row in zip(begins, ends, sizes.tolist(), strict=True)
        if begin <= end and any(row)
    ]


def _relays(costs: ChainCosts) -> list[list[float]]:
    """Gradients that layers hand on as they are: the first layer that holds one beside the stage, the last, bytes."""
    relays = costs.relays
    firsts, sizes = (relays.first - 1).tolist(), np.rint(relays.bytes).tolist()
    rows = zip(firsts, relays.last.tolist(), _plain(sizes), strict=True)
    return [[first, last, size] for first, last, size in rows if first <= last]


def _programs(costs: ChainCosts) -> dict[str, object] | None:
    """What layers need within one program, as sums where only these are asked for."""
    programs = costs.programs
    if programs is None:
        return None
    return {
        "level": programs.level.tolist(),
        "carried_before": sums_before(programs.carried).tolist(),
        "narrowed_before": sums_before(programs.narrowed).tolist(),
        "narrowed_input_before": sums_before(programs.narrowed_input).tolist(),
        "padding_before": (sums_before(programs.padding) + sums_before(programs.laid_out)).tolist(),
        "waiting_before": sums_before(programs.waiting).tolist(),
    }


def _short(values: FloatArray) -> Any:
    """The numbers; one for all where they are the same."""
    plain = _plain(values.tolist())
    return plain[0] if len(set(plain)) == 1 else plain


def _plain(values: Sequence[float]) -> list[float]:
    return [int(value) if value.is_integer() else value for value in values]

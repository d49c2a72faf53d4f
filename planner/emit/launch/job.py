"""Job description for all job schedulers: processes per node, and the cuts between nodes.

Ranks are numbered node by node, so that neighboring stages share a node if possible. Here, a pipeline of 8 devices runs
on 4 nodes with 2 processes each. Three of its seven cuts are between nodes:

    node       node 0   node 1   node 2   node 3
    rank       0  1  |  2  3  |  4  5  |  6  7
"""

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from string import Template
from typing import Final

from planner import __version__
from planner.core.errors import UsageError
from planner.core.values.balance import Balance, balance_path_for_processes
from planner.core.values.nodes import Nodes, are_on_different_nodes
from planner.core.values.placement import rank_of
from planner.core.values.plan import Inputs
from planner.core.values.printable import escape_unprintable
from planner.core.values.units import pluralize
from planner.emit.signature import with_signature

_WIDTH: Final = 110
_MOST_CUTS: Final = 16
"""Largest number of cuts that are listed."""

_GPU: Final = "cuda"


class _AtTemplate(Template):
    delimiter = "@"  # the usual `$` occurs in shell scripts


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """Training job that a launcher starts."""

    script: str
    """Path of train.py, relative to the folder where the job is submitted."""
    cluster_sizes: tuple[Nodes, ...]
    """Nodes and processes per node of each plan that the script supports, most processes first."""
    device: str
    threads: int
    """CPU threads of each process."""
    cuts_between_nodes: tuple[str, ...]
    """Descriptions of the largest plan's cuts that are between nodes."""
    notes: tuple[str, ...] = ()
    """Remarks about assumptions of the plan that do not match the nodes."""

    @property
    def largest(self) -> Nodes:
        """Nodes and processes per node of the plan that needs most processes."""
        return self.cluster_sizes[0]

    @property
    def uses_gpus(self) -> bool:
        """True if every process needs a GPU."""
        return self.device == _GPU

    @property
    def cores_per_process(self) -> int:
        """CPU cores that each process needs: its threads, and one more to move tensors to a GPU."""
        return self.threads + self.uses_gpus

    def path_of(self, name: str) -> str:
        """Return the path of the file `name` in the script's folder."""
        return PurePath(self.script).with_name(name).as_posix()

    def launcher_text(
        self, template: str, *, scheduler: str, launch: str, submit_command: str, **values: object
    ) -> str:
        """Return the text of a launcher file, made from a template, with a signature to detect edits.

        The template's `@header` becomes a comment that describes the job.

        Args:
            template: File name of the template in this folder.
            scheduler: Name of the scheduler, as shown to people.
            launch: Name of the scheduler as a value of `emit --launch`.
            submit_command: Command that submits the file.
            **values: Values of the template's other placeholders.
        """
        text = resources.files(__package__).joinpath(template).read_text(encoding="utf-8")
        lines = [
            f"Starts {self.script} on {scheduler}: {_described(self.largest)}, ranks node by node.",
            f"Written by `gpipe-plan emit --launch {launch}` (gpipe-plan {__version__}). You may edit it.",
            *self._about_nodes(),
            *self._about_plans(),
            *self.notes,
            f"Submit it with: {submit_command}",
        ]
        # Names come from files and must not be able to end a comment.
        wrapped = (
            part for line in lines for part in textwrap.wrap(escape_unprintable(line), _WIDTH, break_long_words=False)
        )
        header = "\n".join(f"# {line}" for line in wrapped)
        return with_signature(_AtTemplate(text).substitute(header=header, **values))

    def _about_nodes(self) -> list[str]:
        if self.largest.count == 1:
            return []
        if not self.cuts_between_nodes:
            return ["No cut is between nodes."]
        more = len(self.cuts_between_nodes) - _MOST_CUTS
        cuts = [*self.cuts_between_nodes[:_MOST_CUTS], *([f"and {more} more"] if more > 0 else [])]
        return [f"Cuts between nodes: {'; '.join(cuts)}."]

    def _about_plans(self) -> list[str]:
        balance = PurePath("balance.yaml")
        fewer = [
            f"{_described(s)} ({balance_path_for_processes(balance, s.num_processes)})" for s in self.cluster_sizes[1:]
        ]
        return [f"With fewer nodes it continues with {', or '.join(fewer)}."] if fewer else []


def make_launch_job(plans: Sequence[Balance], inputs: Inputs, *, script: str, nodes: Nodes | None) -> LaunchJob:
    """Return the `LaunchJob` that starts a training script on a cluster.

    Args:
        plans: Plans of the script, most processes first.
        inputs: Inputs of the first plan.
        script: Path of train.py.
        nodes: Available nodes; defaults to those in `inputs`.

    Raises:
        UsageError: The nodes have too few devices, or no number of nodes can run equally many processes on each node.
    """
    first = plans[0]
    available = _planned_nodes(inputs, first) if nodes is None else nodes
    sizes = tuple(_fewest_nodes(plan.num_processes, available) for plan in plans)
    return LaunchJob(
        script=script,
        cluster_sizes=sizes,
        device=first.device,
        threads=first.threads,
        cuts_between_nodes=_cuts_between_nodes(first, sizes[0].devices),
        notes=_notes(inputs, sizes[0]),
    )


def shell_word(text: str) -> str:
    """Return `text` as one word of bash, on one line."""
    if text.isprintable():
        return shlex.quote(text)
    kept = (c if c.isprintable() and c not in "\\'" else f"\\U{ord(c):08x}" for c in text)
    return f"$'{''.join(kept)}'"


def _planned_nodes(inputs: Inputs, balance: Balance) -> Nodes:
    each = inputs.node_devices or max(inputs.devices, balance.num_processes)
    return Nodes(count=-(-inputs.devices // each), devices=each)


def _fewest_nodes(num_processes: int, nodes: Nodes) -> Nodes:
    for count in range(-(-num_processes // nodes.devices), nodes.count + 1):
        if num_processes % count == 0:  # torchrun starts equally many processes on each node
            return Nodes(count=count, devices=num_processes // count)
    raise UsageError(
        f"{pluralize(num_processes, 'process', 'es')} cannot be shared evenly by nodes of "
        f"{pluralize(nodes.devices, 'device')} (at most {pluralize(nodes.count, 'node')})",
        hint="solve for a number of devices that fills nodes, or give the available nodes: `--nodes 4x8`",
    )


def _cuts_between_nodes(balance: Balance, node_devices: int) -> tuple[str, ...]:
    num_devices, cuts = balance.num_devices, []
    for stage in range(balance.num_stages - 1):
        pairs = [
            (rank_of(stage, r, num_devices, balance.placement), rank_of(stage + 1, r, num_devices, balance.placement))
            for r in range(balance.replicas)
        ]
        ranks = ", ".join(f"{a} to {b}" for a, b in pairs if are_on_different_nodes(a, b, node_devices))
        if ranks:
            cuts.append(f"after {balance.stages[stage].layers[-1]}, stage {stage} to {stage + 1} (rank {ranks})")
    return tuple(cuts)


def _notes(inputs: Inputs, size: Nodes) -> tuple[str, ...]:
    if size.count == 1 or inputs.links:
        return ()
    if not inputs.node_devices:
        return (f"the plan assumes equal links within and between nodes: `solve --nodes {size} --inter-link …`",)
    if inputs.node_devices != size.devices:
        used = f"the plan is for nodes of {inputs.node_devices} devices, but {size.devices} per node are used here"
        return (f"{used}: `solve --nodes {size}`",)
    return ()


def _described(size: Nodes) -> str:
    return f"{pluralize(size.count, 'node')} of {pluralize(size.devices, 'process', 'es')}"

"""Rewrite a trace recorded operator by operator to one whose blocks are compiled.

Only units of kind ``block`` are compiled, each by itself: one graph for forward, one for backward. Results of *fusable*
operators (element-wise, normalisations, copies; see ``timeline.is_fusable``) change in such a graph:

1. Backward keeps what a minimum cut tells it to, instead of what autograd saves. In the graph of a block's forward, the
   sources are tensors that cannot be recomputed, the sinks are tensors that backward reads. Results of operators that
   are not fusable, of reductions, and those read by such an operator of backward cannot be recomputed. A result weighs
   its bytes, twice that if it need not exist otherwise, and more the farther it is from backward; gathered parameters
   and the batch weigh nothing. Everything else is recomputed within the fused kernels that read it and takes no memory.
   Source: ``solve_min_cut`` of torch/_functorch/partitioners.py.
2. In a block with activation checkpointing, its own choice of what is kept is honoured: rule 1 does not apply. Yet
   tensors that backward does not read are not kept, as they are in eager mode: the output of a block's last matmul.
3. A result that only fusable operators of the same graph read never exists if they run without another operator in
   between, or if its sources are alive anyhow when the last of them runs: then it is recomputed there.

Neglected: graph breaks; chains that torch does not recompute because they are long or because their readers are far
apart; results that exist because too much would have to be fused; in-place reuse of memory; that a compiled backward
recomputes late what a checkpointed block recomputes at once. Operators, their order and their bytes stay the same:
``timeline.all_seconds`` decides which of them are one kernel.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import networkx

from trueshard.planner.ledger import Lifetime, lifetimes
from trueshard.planner.timeline import is_fusable
from trueshard.planner.trace import Allocation, Communication, Event, Free, Kernel, Trace
from trueshard.plans import Plan

REDUCTION = 4
"""Factor by which a result must be smaller than its inputs to be kept. Source: ``should_ban_recomputation``."""

FARTHER = 1.1
"""Factor of a result's weight for each operator between it and backward. Source: ``get_node_weight``."""

_FREE_TO_KEEP = ("parameters", "gathered", "inputs")

_Graph = tuple[str, str, int]
"""Phase, unit, microbatch."""


def compiled(trace: Trace, plan: Plan) -> Trace:
    """Return an eager step's trace, which has ``reads`` and ``writes``, with the blocks of ``plan`` compiled.

    Operators' results are ``temporary``: which of them are activations depends on where they are freed then.
    """
    blocks = {unit.name: unit.activation_checkpointing == "none" for unit in plan.units if unit.kind == "block"}
    flow = _DataFlow(trace, set(blocks))
    for forward in [graph for graph in flow.kernels if graph[0] == "forward"]:
        backward = flow.kernels.get(("backward", *forward[1:]))
        if backward is None:
            continue
        if blocks[forward[1]]:
            _recompute(flow, forward)
        _free_unread(flow, forward, backward[0])
    for storage in flow.storages.values():  # oldest first
        if storage.allocation.kind == "temporary" and storage.made >= 0 and flow.is_fused(storage):
            _fuse(flow, storage)
    return flow.rewritten()


@dataclass(slots=True)
class _Storage(Lifetime):
    """Lifetime and use of one storage; ``freed`` is at first that of the eager step."""

    makers: list[int] = field(default_factory=list)
    """Positions of kernels that write it."""
    readers: list[int] = field(default_factory=list)
    """Positions of kernels that read it from memory."""
    exists: bool = True


class _DataFlow:
    """Storages with their makers and readers, and kernels with their graphs."""

    def __init__(self, trace: Trace, blocks: set[str]) -> None:
        self.trace = trace
        self.events = trace.events
        self.storages = {
            life.allocation.storage: _Storage(life.allocation, life.made, life.freed) for life in lifetimes(trace)
        }
        self.kernels: dict[_Graph, list[int]] = defaultdict(list)
        self.graph_of: dict[int, _Graph] = {}
        self.run_of: dict[int, int] = {}
        """Position of a fusable kernel → number of the uninterrupted row of fusable kernels that it belongs to."""
        microbatch, before, runs = 0, "", 0
        for i, event in enumerate(self.events):
            phase = event.place.phase
            microbatch += phase == "forward" and before == "backward"
            before = phase
            if isinstance(event, Kernel):
                in_graph = phase in ("forward", "backward") and event.place.unit in blocks and event.stream == "compute"
                if in_graph and event.op.startswith(("aten.", "fused.")):
                    graph = phase, event.place.unit, microbatch
                    self.kernels[graph].append(i)
                    self.graph_of[i] = graph
                if i in self.graph_of and is_fusable(event):
                    self.run_of[i] = runs
                else:
                    runs += event.stream == "compute"
                for number in event.reads:
                    self.storages[number].readers.append(i)
                for number in event.writes:
                    self.storages[number].makers.append(i)

    def kernel(self, position: int) -> Kernel:
        event = self.events[position]
        assert isinstance(event, Kernel)
        return event

    def graph(self, storage: _Storage) -> _Graph | None:
        """Return the graph that writes the storage; None if none does, or several do."""
        graphs = {self.graph_of.get(i) for i in storage.makers}
        return graphs.pop() if len(graphs) == 1 else None

    def is_fused(self, storage: _Storage) -> bool:
        """True if only fusable operators of one graph write the storage."""
        return self.graph(storage) is not None and all(i in self.run_of for i in storage.makers)

    def sources(self, storage: _Storage) -> list[_Storage]:
        numbers = dict.fromkeys(number for i in storage.makers for number in self.kernel(i).reads)
        return [self.storages[number] for number in numbers if number != storage.allocation.storage]

    def rewritten(self) -> Trace:
        moved: dict[int, list[_Storage]] = defaultdict(list)
        for storage in self.storages.values():
            if storage.freed < len(self.events) and storage.exists:
                moved[storage.freed].append(storage)
        events: list[Event] = []
        at: list[int] = []
        for i, event in enumerate(self.events):
            at.append(len(events))
            if isinstance(event, Allocation):
                if self.storages[event.storage].exists:
                    events.append(event)
            elif isinstance(event, (Kernel, Communication)) and event.after:
                events.append(dataclasses.replace(event, after=tuple(at[position] for position in event.after)))
            elif not isinstance(event, Free):
                events.append(event)
            events += [Free(event.place, ended.allocation.storage, ended.allocation.bytes) for ended in moved[i]]
        return Trace(events, self.trace.resident)


# Rules 1 and 2: what backward keeps


def _recompute(flow: _DataFlow, forward: _Graph) -> None:
    """Let a block's backward read only tensors that the cut keeps; the others are freed in forward."""
    backward: _Graph = ("backward", *forward[1:])
    first = flow.kernels[backward][0]
    storages = _storages_of(flow, forward)
    wanted = {
        number: [i for i in storage.readers if flow.graph_of.get(i) == backward]
        for number, storage in storages.items()
        if storage.made < first
    }
    wanted = {number: readers for number, readers in wanted.items() if readers}
    if not wanted:
        return
    made_from = networkx.DiGraph()
    made_from.add_nodes_from(storages)
    for number, storage in storages.items():
        if flow.graph(storage) == forward:
            made_from.add_edges_from((number, source.allocation.storage) for source in flow.sources(storage))
    kept = _cut(flow, forward, storages, wanted, made_from)
    made_from.remove_edges_from(list(made_from.out_edges(kept)))
    for number, readers in wanted.items():
        storage = storages[number]
        if number in kept or flow.graph(storage) != forward:
            continue
        last = readers[-1]
        for ancestor in kept & networkx.descendants(made_from, number):
            source_storage = storages[ancestor]
            if source_storage.allocation.kind not in _FREE_TO_KEEP:
                source_storage.freed = max(source_storage.freed, _free_position(flow, last))
                source_storage.readers = sorted({*source_storage.readers, *readers})
        storage.readers = [i for i in storage.readers if i not in readers]


def _free_unread(flow: _DataFlow, forward: _Graph, first: int) -> None:
    """Free results of forward that nothing reads from position ``first`` on, where backward begins."""
    for storage in _storages_of(flow, forward).values():
        if storage.allocation.kind != "temporary" or flow.graph(storage) != forward:
            continue
        last = max([*storage.readers, *storage.makers])
        if last < first < storage.freed < len(flow.events):
            storage.freed = _free_position(flow, last)


def _storages_of(flow: _DataFlow, forward: _Graph) -> dict[int, _Storage]:
    kernels = map(flow.kernel, flow.kernels[forward])
    return {number: flow.storages[number] for kernel in kernels for number in (*kernel.reads, *kernel.writes)}


def _cut(
    flow: _DataFlow,
    forward: _Graph,
    storages: dict[int, _Storage],
    wanted: dict[int, list[int]],
    made_from: networkx.DiGraph,
) -> set[int]:
    """Return the storages to keep. Nodes are (index in ``known``, side), so that equal blocks are cut alike."""
    index = {number: i for i, number in enumerate(storages)}
    distances = networkx.multi_source_dijkstra_path_length(made_from, set(wanted))
    graph = networkx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for number, storage in storages.items():
        here = index[number]
        graph.add_edge((here, 0), (here, 1), capacity=_weight(flow, storage, forward, distances.get(number, 100)))
        if not _may_be_recomputed(flow, forward, storage, wanted.get(number, [])):
            graph.add_edge("source", (here, 0))
        else:
            for source in made_from.successors(number):
                graph.add_edge((index[source], 1), (here, 0))
        if number in wanted:
            graph.add_edge((here, 1), "sink")
    _, (near, far) = networkx.minimum_cut(graph, "source", "sink")
    return {number for number in storages if (index[number], 0) in near and (index[number], 1) in far}


def _may_be_recomputed(flow: _DataFlow, forward: _Graph, storage: _Storage, readers: Sequence[int]) -> bool:
    """``readers``: positions of kernels of backward that read the storage."""
    if flow.graph(storage) != forward or not flow.is_fused(storage):
        return False
    if any(i not in flow.run_of for i in readers):
        return False
    return storage.allocation.bytes * REDUCTION >= max(flow.kernel(i).read for i in storage.makers)


def _weight(flow: _DataFlow, storage: _Storage, forward: _Graph, distance: int) -> int:
    """``distance``: operators between the storage and the nearest one of backward."""
    if storage.allocation.kind in _FREE_TO_KEEP:
        return 0
    exists = flow.graph(storage) != forward or any(i not in flow.run_of for i in (*storage.makers, *storage.readers))
    return int(storage.allocation.bytes * FARTHER ** min(distance + 1, 100)) * (1 if exists else 2)


# Rule 3: what never exists


def _fuse(flow: _DataFlow, storage: _Storage) -> None:
    """Remove a result from the trace if nothing reads it from memory; its sources must have been decided before."""
    graph = flow.graph(storage)
    if storage.freed == len(flow.events) or not all(flow.graph_of.get(i) == graph for i in storage.readers):
        return
    if any(i not in flow.run_of for i in storage.readers):
        return
    runs = {flow.run_of[i] for i in (*storage.makers, *storage.readers)}
    last = max((*storage.makers, *storage.readers))
    if len(runs) == 1 or all(_is_available(flow, source, last) for source in flow.sources(storage)):
        storage.exists = False


def _is_available(flow: _DataFlow, storage: _Storage, position: int) -> bool:
    if storage.exists:
        return storage.freed > position
    return all(_is_available(flow, source, position) for source in flow.sources(storage))


def _free_position(flow: _DataFlow, position: int) -> int:
    """Return where memory is freed that the kernel at a position reads last: after the kernel's allocations."""
    while position + 1 < len(flow.events) and isinstance(flow.events[position + 1], Allocation):
        position += 1
    return position

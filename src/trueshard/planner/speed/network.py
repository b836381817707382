"""How long a collective takes: latency by its steps, and bytes over the bandwidth of the links on its way.

A rank receives ``received`` bytes, (n-1)/n of the whole for an all-gather or a reduce-scatter and twice that for an
all-reduce, so time is ``received`` over the *bus bandwidth* as NCCL's tests define it (nccl-tests, PERFORMANCE.md).
Steps and their latencies are those of NCCL's own tuning model (src/graph/tuning.cc): a ring of n ranks over k nodes
has n-k steps inside nodes and k-1 between them, a tree has log2(k) steps between nodes in each direction.
"""

from __future__ import annotations

import math

from trueshard.planner.events import Communication
from trueshard.planner.speed.hardware import Hardware

BASE_LATENCY = 10e-6
"""Seconds before anything moves: NCCL's own model has 7 to 14 µs for a ring, by protocol."""

TREE = 0.9
"""Part of a ring's bandwidth that a tree has, in NCCL's tuning model."""

STRAGGLING = 0.01
"""By what part a step grows with each doubling of nodes, for every collective waits for the slowest rank.

Published steps grow by that much more than links explain: from 1 to 16 nodes 4% (TorchTitan, 8B on H100; llm-foundry,
7B on H100), from 8 to 64 nodes 3% (llm-foundry, 70B), and more only where steps are short (7B to 64 nodes: 11%).
"""


def seconds(communication: Communication, hardware: Hardware, ranks_per_node: int) -> float:
    """How long the collective occupies its stream, once every rank has come to it.

    Args:
        communication: ``stride`` and ``ranks`` say which ranks take part, and so how many of them are on one node.
        hardware: whose links.
        ranks_per_node: neighbouring global ranks that share a node.
    """
    if communication.ranks == 1 or communication.received == 0:
        return 0.0
    inside, nodes = spread(communication, ranks_per_node)
    if communication.op == "all_to_all":
        return _all_to_all(communication.received, inside, nodes, communication.ranks, hardware)
    bus = bus_bandwidth(inside, nodes, hardware)
    ring = (communication.ranks - nodes) * hardware.link_latency + (nodes - 1) * hardware.network_latency
    if communication.op != "all_reduce":
        return BASE_LATENCY + ring + communication.received / bus
    tree = (inside - 1) * hardware.link_latency + math.ceil(math.log2(nodes)) * hardware.network_latency
    return BASE_LATENCY + min(
        2 * ring + communication.received / bus,
        2 * tree + communication.received / (bus * TREE),
    )


def spread(communication: Communication, ranks_per_node: int) -> tuple[int, int]:
    """(ranks of the group on one node, nodes), for a group that begins at the first rank of a node."""
    inside = min(communication.ranks, max(1, ranks_per_node // communication.stride))
    return inside, math.ceil(communication.ranks / inside)


def bus_bandwidth(inside: int, nodes: int, hardware: Hardware) -> float:
    """Bytes a second that reach each rank of a ring with ``inside`` ranks on each of ``nodes`` nodes.

    NCCL lays rings so that each enters a node through another rank's adapter: a node's ranks share what all their
    adapters bring, and it then passes over the links inside, which may be slower.
    """
    link = hardware.link_bandwidth * hardware.link_efficiency
    if nodes == 1:
        return link
    network = inside * hardware.network_bandwidth * hardware.network_efficiency
    return network if inside == 1 else min(link, network)


def _all_to_all(received: int, inside: int, nodes: int, ranks: int, hardware: Hardware) -> float:
    """Each pair of ranks for itself: what comes from other nodes comes through the rank's own adapter."""
    near = received * (inside - 1) / (ranks - 1)
    over_links = near / (hardware.link_bandwidth * hardware.link_efficiency)
    over_network = (received - near) / (hardware.network_bandwidth * hardware.network_efficiency)
    latency = hardware.link_latency if nodes == 1 else hardware.network_latency
    return BASE_LATENCY + latency + max(over_links, over_network)

"""Every invariant of a prefix tree, asserted: the one reader of its private parts."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from radix.node import Node, Pin, gives_way

if TYPE_CHECKING:
    from radix.tree import PrefixTree


def check_tree(tree: "PrefixTree", pins: Iterable[Pin] | None = None) -> None:
    """Query. With all pins that have not ended given, no others may be counted. All headers must be sound."""
    roots = set(tree._roots.values())
    attached, detached = _below(roots), tree._detached
    assert attached.isdisjoint(detached)
    for node in roots | attached:
        node.check()
        _check_children(tree, node)
    for node in detached:
        assert node.pins
        assert node.detached
        assert not node.order
    tree._index.check(attached)
    tree._owners.check(attached | detached)
    _check_pins(roots | attached | detached, pins)
    for group in tree._groups:
        _check_group(tree, group, {node for node in attached | detached if node.group == group})


def _below(roots: set[Node]) -> set[Node]:
    nodes, below = set(), [child for root in roots for child in root.order]
    while below:
        node = below.pop()
        nodes.add(node)
        below += node.order
    return nodes


def _check_children(tree: "PrefixTree", node: Node) -> None:
    symbols = [tree._symbols_of(child.first_slot) for child in node.order]
    assert symbols == sorted(symbols)
    for below, (lower, upper) in zip(node.order, pairwise(symbols), strict=False):
        assert not (below.short and gives_way(lower, upper))
    if node.parent is not None:
        last_used = tree._owners.last_used(node.first_slot)
        assert all(tree._owners.last_used(child.first_slot) <= last_used for child in node.order)


def _check_pins(nodes: set[Node], pins: Iterable[Pin] | None) -> None:
    ending = Counter({node: node.pins for node in nodes})
    for node in nodes:
        if node.parent is not None:
            ending[node.parent] -= node.pins
    assert all(count >= 0 for count in ending.values())
    assert pins is None or +ending == Counter(pin.node for pin in pins)


def _check_group(tree: "PrefixTree", group: int, nodes: set[Node]) -> None:
    evictable = {node for node in nodes if not node.pins}
    assert tree.num_blocks(group) == sum(node.num_blocks for node in nodes)
    assert tree.num_evictable(group) == sum(node.num_blocks for node in evictable)
    victim = tree._groups[group].policy.victim()
    assert (victim is not None) == (tree.num_evictable(group) > 0)
    assert victim is None or (victim in evictable and victim.is_victim)
    coldest = min((tree._owners.last_used(node.first_slot) for node in evictable if node.is_victim), default=None)
    assert tree.coldest(group) == coldest

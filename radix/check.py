"""Every invariant of a prefix tree, asserted: the one reader of its private parts."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from radix.node import Node, Pin

if TYPE_CHECKING:
    from radix.tree import PrefixTree


def check_tree(tree: "PrefixTree", pins: Iterable[Pin] | None = None) -> None:
    """Query. With all pins that have not ended given, no others may be counted."""
    attached, detached = _attached(tree), tree._detached
    assert attached.isdisjoint(detached)
    for node in attached:
        node.check()
        assert node.parent is None or node.symbols == tree._symbols_of(node.slots[0])
    for node in detached:
        assert node.pins
        assert node.detached
        assert not node.children
    nodes = attached | detached
    tree._owners.check(nodes)
    _check_pins(nodes, pins)
    for group in tree._groups:
        _check_group(tree, group, {node for node in nodes if node.group == group})


def _attached(tree: "PrefixTree") -> set[Node]:
    nodes, below = set(), list(tree._roots.values())
    while below:
        node = below.pop()
        nodes.add(node)
        below += node.order
    return nodes


def _check_pins(nodes: set[Node], pins: Iterable[Pin] | None) -> None:
    ending = Counter({node: node.pins for node in nodes})
    for node in nodes:
        if node.parent is not None:
            ending[node.parent] -= node.pins
    assert all(count >= 0 for count in ending.values())
    assert pins is None or +ending == Counter(pin.node for pin in pins)


def _check_group(tree: "PrefixTree", group: int, nodes: set[Node]) -> None:
    evictable = {node for node in nodes if not node.pins}
    assert tree.num_blocks(group) == sum(len(node.slots) for node in nodes)
    assert tree.num_evictable(group) == sum(len(node.slots) for node in evictable)
    victim = tree._groups[group].policy.victim()
    assert (victim is not None) == (tree.num_evictable(group) > 0)
    assert victim is None or (victim in evictable and victim.is_victim)

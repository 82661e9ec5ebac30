"""The order of victims: coldest first, tail first, cheap."""

import random
import time
from array import array
from collections import OrderedDict

from radix import LRU, BlockHash, Node, PrefixTree, hash_prefix, token_bytes
from radix.hashing import HashKind, block_symbols

ROOT = BlockHash(bytes(16))
GROUP = 4096


def leaf(last_used: int) -> Node:
    return Node(bytearray(16), array("I", [0]), b"", None, GROUP, last_used=last_used)


def order_of(policy: LRU) -> list[Node]:
    victims = []
    while (node := policy.victim()) is not None:
        victims.append(node)
        policy.withdraw(node)
    return victims


def test_coldest_goes_first_and_ties_in_order_of_offer() -> None:
    nodes = [leaf(last_used) for last_used in (5, 3, 9, 3)]
    policy = LRU()
    for node in nodes:
        policy.offer(node)
    assert order_of(policy) == [nodes[1], nodes[3], nodes[0], nodes[2]]


def test_touched_node_moves_back_and_withdrawn_node_is_no_victim() -> None:
    first, second, third = nodes = [leaf(1), leaf(2), leaf(3)]
    policy = LRU()
    for node in nodes:
        policy.offer(node)
    first.last_used = 4
    policy.offer(first)
    policy.withdraw(second)
    policy.withdraw(second)
    assert order_of(policy) == [third, first]


def test_victim_is_a_query() -> None:
    policy = LRU()
    node = leaf(1)
    policy.offer(node)
    assert policy.victim() is node
    assert policy.victim() is node
    policy.withdraw(node)
    assert policy.victim() is None


def test_heap_stays_bounded_under_traffic() -> None:
    """LEK: 100 leaves pinned and unpinned 10,000 times, then all gone."""
    policy = LRU()
    nodes = [leaf(0) for _ in range(100)]
    for tick in range(10_000):
        node = nodes[tick % len(nodes)]
        policy.withdraw(node)
        node.last_used = tick
        policy.offer(node)
        assert len(policy) <= 2 * len(nodes) + 64
    for node in nodes:
        policy.withdraw(node)
    assert len(policy) <= 64


def test_few_victims_among_100k_leaves_take_microseconds() -> None:
    """PRF: what a full tier pays for each new block."""
    policy = LRU()
    rng = random.Random(1)
    for _ in range(100_000):
        policy.offer(leaf(rng.randrange(1 << 30)))
    start = time.perf_counter()
    for _ in range(100):
        node = policy.victim()
        assert node is not None
        policy.withdraw(node)
    assert (time.perf_counter() - start) / 100 < 500e-6  # measured 2 us


class FlatLru:
    """The model: blocks in one list, each chain touched tail first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def request(self, tokens: tuple[int, ...]) -> int:
        """Number of blocks that were known."""
        chain = [tokens[: i + 1] for i in range(len(tokens))]
        num_known = next((i for i, block in enumerate(chain) if block not in self.blocks), len(chain))
        for block in reversed(chain):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return num_known


class TreeLru:
    """The tree with one token a block, used like a tier: match, pin, make room, insert, unpin."""

    def __init__(self, capacity: int) -> None:
        self.free = list(range(capacity))
        self.symbols: dict[int, bytes] = {}
        self.tree = PrefixTree(self.symbols.__getitem__)
        self.tree.add_root(ROOT, GROUP)

    def request(self, tokens: tuple[int, ...]) -> int:
        packed = token_bytes(tokens)
        hashes = hash_prefix(ROOT, packed, 1, HashKind.XXH3)
        match = self.tree.match(ROOT, hashes)
        assert match is not None
        pin = self.tree.pin(match)
        num_new = len(tokens) - match.num_blocks
        self.free += self.tree.evict(GROUP, max(0, num_new - len(self.free)))
        slots = [self.free.pop() for _ in range(num_new)]
        symbols = [block_symbols(packed[4 * i : 4 * i + 4], ()) for i in range(len(tokens))]
        self.symbols.update(zip(slots, symbols[match.num_blocks :], strict=True))
        self.tree.insert(ROOT, hashes, match.num_blocks, slots, symbols.__getitem__, short=False)
        self.free += self.tree.unpin(pin)
        return match.num_blocks


def test_tree_forgets_like_flat_lru_touched_tail_first() -> None:
    """Leaf-first eviction of runs equals flat LRU over blocks to the last block, as the eviction study found."""
    rng = random.Random(7)
    flat, tree = FlatLru(40), TreeLru(40)
    num_hits = 0
    for _ in range(3000):
        tokens = tuple(rng.choice((1, 1, 1, 2, 3)) for _ in range(rng.randint(1, 12)))
        known = flat.request(tokens)
        assert tree.request(tokens) == known
        num_hits += known
        assert tree.tree.num_blocks(GROUP) == len(flat.blocks)
    tree.tree.check(pins=[])
    assert num_hits > 3000  # the twin that forgets everything would agree on nothing

"""The reference connector against a toy engine whose KV is a function of the tokens before it."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
from connectors.reference import ReferenceConnector

SPEC = kvstore.KVSpec(model="toy", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=4, block_tokens=16)
CHAT = list(range(100, 150))


class ToyPages:
    """KV of a sequence: each token's values derive from the running sum of the tokens so far."""

    def __init__(self, num_tokens: int) -> None:
        self.kv = np.zeros(SPEC.array_shape(num_tokens), np.float32)

    def compute(self, token_ids: list[int], start: int) -> None:
        sums = np.cumsum(np.asarray(token_ids, np.float32))[start:]
        self.kv[:, :, :, start : len(token_ids)] = sums[:, None]

    def read(self, start: int, num_tokens: int) -> npt.NDArray[np.float32]:
        return self.kv[:, :, :, start : start + num_tokens]

    def write(self, start: int, kv: npt.NDArray[np.float32]) -> None:
        self.kv[:, :, :, start : start + kv.shape[3]] = kv


def prefill(connector: ReferenceConnector, token_ids: list[int]) -> tuple[int, ToyPages]:
    pages = ToyPages(len(token_ids))
    loaded = connector.load(token_ids, pages)
    pages.compute(token_ids, loaded)
    return loaded, pages


@pytest.fixture
def client() -> Iterator[kvstore.Client]:
    with kvstore.open({"memory": {"capacity": "8MiB"}}) as client:
        yield client


def test_next_turn_loads_what_this_turn_saved(client: kvstore.Client) -> None:
    connector = ReferenceConnector(client, SPEC)
    loaded, pages = prefill(connector, CHAT)
    assert loaded == 0
    assert connector.save(CHAT, pages)
    longer = [*CHAT, 7, 8, 9]
    loaded, pages = prefill(connector, longer)
    assert loaded == len(CHAT)
    expected = ToyPages(len(longer))
    expected.compute(longer, 0)
    assert np.array_equal(pages.kv, expected.kv)


def test_last_token_is_left_to_the_engine(client: kvstore.Client) -> None:
    connector = ReferenceConnector(client, SPEC)
    connector.save(CHAT, prefill(connector, CHAT)[1])
    assert prefill(connector, CHAT)[0] == len(CHAT) - 1


def test_closed_store_is_a_miss_and_a_dropped_save() -> None:
    """HNG, RST: an engine goes on without its cache."""
    client = kvstore.open({"memory": {"capacity": "8MiB"}})
    connector = ReferenceConnector(client, SPEC)
    client.close()
    loaded, pages = prefill(connector, CHAT)
    assert loaded == 0
    assert not connector.save(CHAT, pages)
    connector.report(prefill_tokens=50, prefill_ms=1.0, ttft_ms=1.0)

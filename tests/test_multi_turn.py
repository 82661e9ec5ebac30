"""What multi_turn means by an answer from the SSD, on a small random Llama."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the transformers extra is not installed")
pytest.importorskip("transformers", reason="the transformers extra is not installed")

import kvstore  # noqa: E402
from benchmarks import models  # noqa: E402
from benchmarks.daemon import Daemon  # noqa: E402
from benchmarks.disk_rate import disk_options  # noqa: E402
from benchmarks.engine import answer_plain  # noqa: E402
from benchmarks.multi_turn import ANSWER_TOKENS, OnSsd  # noqa: E402
from connectors.transformers import CachedModel  # noqa: E402
from tests.test_transformers import prompt_of, small_model  # noqa: E402


def test_all_that_is_restored_comes_from_the_ssd(tmp_path: Path) -> None:
    model, prompt = small_model(), prompt_of(150)
    with (
        Daemon("64MiB", *disk_options(tmp_path, 64 << 20)) as daemon,
        kvstore.connect(daemon.address, deadline_ms=10_000) as client,
        kvstore.connect(daemon.address, deadline_ms=10_000) as patient,
    ):
        on_ssd = OnSsd(model, client, patient)
        answers = [on_ssd.answer(prompt)]
        spec = CachedModel(model, patient, name=models.NAME).spec
        patient.attach(spec).report(prefill_tokens=100_000, prefill_ms=1e7)  # no drive beats so small a model
        answers += [on_ssd.answer(prompt) for _ in range(2)]
        stats = on_ssd.stats()
    plain = answer_plain(model, prompt, ANSWER_TOKENS)
    assert [answer.token_ids for answer in answers] == 3 * [plain.token_ids]
    assert [answer.num_cached_tokens for answer in answers] == [0, len(prompt) - 1, len(prompt) - 1]
    assert stats["tokens_loaded"] == 2 * (len(prompt) - 1)

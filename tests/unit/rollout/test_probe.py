"""The proof by log-probs: equal weights give equal answers, others do not, and a lost transfer is detected."""

from __future__ import annotations

import pytest

from shoal.core.errors import EngineError
from shoal.rollout.remote.server_info import Probes


def test_reloaded_weights_must_answer_as_before() -> None:
    probes = Probes("vLLM")
    probes.judge("a", [-1.0, -2.0], 1)
    probes.judge("b", [-1.5, -2.5], 2)
    probes.judge("a", [-1.05, -2.0], 3)  # rounding
    with pytest.raises(EngineError, match=r"version 4, but log-probs after a fixed prompt differ by 0\.7"):
        probes.judge("b", [-1.5, -3.2], 4)


def test_new_weights_must_change_within_two_versions() -> None:
    probes = Probes("vLLM")
    probes.judge("a", [-1.0, -2.0], 1)
    probes.judge("b", [-1.0, -2.0], 2)  # a small update in bf16 may leave sixteen numbers unchanged
    with pytest.raises(EngineError, match=r"loaded 2 new weight versions .* have not moved"):
        probes.judge("c", [-1.0, -2.0], 3)


def test_change_resets_the_count() -> None:
    probes = Probes("vLLM")
    for version, (content, value) in enumerate([("a", -1.0), ("b", -1.0), ("c", -1.1), ("d", -1.1), ("e", -1.2)]):
        probes.judge(content, [value], version)


def test_step_without_training_republishes_the_weights() -> None:
    probes = Probes("vLLM")
    for version in range(5):
        probes.judge("a", [-1.0], version)

"""Which prompts fit, without slow tokenization of very long texts."""

from __future__ import annotations

import time

from shoal.build.sampler import fits_in
from shoal.models.chat import Chat
from shoal.models.random_models import character_tokenizer


def test_prompt_of_100_mb_is_skipped_fast():
    fits = fits_in(Chat(character_tokenizer()), 64)
    began = time.monotonic()
    assert not fits([{"role": "user", "content": "x" * 100_000_000}])
    assert time.monotonic() - began < 1
    assert fits([{"role": "user", "content": "x" * 20}])


def test_template_edge_equals_the_tokenizer():
    """Ids below, equal to and above the limit."""
    chat = Chat(character_tokenizer())
    message = [{"role": "user", "content": "x" * 20}]
    ids = len(chat.prompt_ids(message))
    assert [fits_in(chat, room)(message) for room in (ids - 1, ids, ids + 1)] == [False, True, True]

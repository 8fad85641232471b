"""Rollout engines in another process: one HTTP client, and the APIs of Shoal, vLLM and SGLang servers."""

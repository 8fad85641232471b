"""The core: what one GRPO step does, from prompts to a new version of the weights. Read it first: docs/reading.md."""

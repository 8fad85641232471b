"""The three-process layout: `grpo-infer`, `grpo-orch` and `grpo-train`, and the supervisor that runs all three."""

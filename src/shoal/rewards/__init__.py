"""Rewards: graders for numbers and mathematics, and the pool of killable processes that runs any reward.

`pool.RewardPool` is the judge the orchestrator calls. Nothing here imports torch.
"""

"""Reinforcement learning in small: weights from FSDP2 trainers into a tensor-parallel engine."""

"""Channels that carry weights to engines and samples to trainers."""

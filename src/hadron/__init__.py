"""Hadron runs quantized GLM-5-family checkpoints as they were published."""

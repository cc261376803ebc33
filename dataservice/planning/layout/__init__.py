"""Laying a model over the GPUs, before training: descriptions, costs and the offline planners."""

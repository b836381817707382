"""Knows memory, traffic and speed of a job before there is a cluster: the real code, run on fake tensors."""

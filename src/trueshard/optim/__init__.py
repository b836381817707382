"""Optimizers under sharding: the same objects, bound to the shards."""

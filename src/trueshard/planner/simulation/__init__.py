"""One rank's step on fake tensors, written down, and continued over blocks that repeat."""

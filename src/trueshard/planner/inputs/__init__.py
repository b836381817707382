"""Inputs of the user as a workload: a configuration, a file, a function, a module."""

"""What the user has, as a workload: a configuration, a file, a function, a module."""

"""Knows memory, traffic and speed of a job before there is a cluster: the real code, run on fake tensors.

The way of the data: what the user has → ``models`` → a ``Workload`` → ``simulate`` (one rank's real step, written down
by ``recorder``; blocks that repeat by ``repeats`` and ``extend``) → a ``Trace`` → ``ledger`` (live memory), ``reserve``
(what the caching allocator makes of it), ``timeline`` (when everything runs) → ``forecasting`` → a ``Study``.
``search`` makes many of them and keeps the best; ``report``, ``page`` and ``difference`` show them.
"""

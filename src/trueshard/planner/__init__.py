"""Memory, traffic and speed of a job before there is a cluster: the real code, run on fake tensors.

``planning`` sends a request to the planner's ``process``, where ``solve`` answers it: ``inputs`` make a ``Workload`` of
what the user has, ``search`` chooses plans. Of each plan ``simulation`` records a step of one rank as a ``Trace``;
``ledger`` (live memory), ``reserve`` (what the caching allocator makes of it) and ``timeline`` read it, ``forecasting``
makes a ``Study`` of them, and ``report`` shows it.
"""

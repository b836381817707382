"""The contract, run on the user's own model: one process against many.

- ``subject``: what is verified, a factory or a training configuration, built again in each process.
- ``training``: the few steps that all processes take; ``reference``, ``sharded`` and ``restored`` are the three runs.
- ``compare`` and ``structure``: what is held against what, and how far apart it may be.
- ``starting``: processes, time limits and failures; ``verify`` goes from the user's words to a ``report``.
"""

"""What TrueShard costs beside a hand-written ``fully_shard`` loop and its peers: ``python -m benchmarks [name …]``.

What is right at all:

- ``goes_wrong``: what users report as gone wrong, tried under every peer and held against one process.
- ``silent``, ``silent_clean``: bugs that raise nothing, found and localised or not; false alarms of clean runs.

Beside every peer, in the same run and by turns (``benchmarks.peers``):

- ``peers_step``: the time of a step, of clipping and of the optimizer's step.
- ``peers_limits``: the bytes that a step receives and the memory at its peak, over their limits.
- ``first_step``: from a process with its imports done to the end of the first step.
- ``compiled``: first steps, cold and warm, and later ones, with compiled blocks.
- ``checkpoint``: loading, saving, and saving in the background.
- ``rl``: a step of reinforcement learning, and what is learned.
- ``planner_error``: predicted over measured peak memory.

Beside one other way alone, and more closely:

- ``step``, ``optimizer``, ``muon``, ``shard_time``, ``traffic``: a hand-written loop, torch's optimizers on DTensors, a
  Muon that gathers, ``fully_shard`` itself, the least bytes of each policy.
- ``device_cost``: waits of the host and operations of a step on a CUDA device, counted on the emulated one.
- ``planner``, ``planner_published``: what a forecast takes, and forecasts beside published runs.

Each benchmark is a module with ``run(tell, quick) -> Table``. They run real processes on the CPU: ratios carry over to
other machines, absolute times do not, so none is reported alone but what is a promise in seconds. ``--device cuda`` is
another thing: tokens a second and memory on one GPU (``benchmarks.cuda``).
"""

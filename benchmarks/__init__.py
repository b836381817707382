"""What TrueShard costs beside a hand-written ``fully_shard`` loop: ``python -m benchmarks [name …]``.

- ``step``: the time of a training step, as a ratio of paired steps in one run.
- ``optimizer``: how many times faster an optimizer's step and clipping are than on DTensors.
- ``muon``: a Muon step by owners at Llama 3.2 1B's shapes, against gathering every matrix on every rank.
- ``shard_time``: the seconds that ``shard()`` adds to ``fully_shard``'s own, on an 8B-shaped model.
- ``traffic``: the bytes that a rank receives in a step, over the least that the policy allows.

Each benchmark is a module with ``run(tell) -> Table``. They run real processes on the CPU: ratios carry over to other
machines, absolute times do not, so none is reported but the one that is a promise in seconds.
"""

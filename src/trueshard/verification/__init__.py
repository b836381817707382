"""`trueshard.verify`: the contract on the user's own model, one process against many.

- ``subjects``, ``config_subject``: the model that is verified, from a factory or a training configuration, built again
  in each process; ``training``: the steps that all processes take.
- ``reference``: the run without sharding; ``sharded``: the sharded run, and the one that goes on from its checkpoint.
- ``compare``: values and structure of two runs, and how far apart they may be.
- ``processes``: one process of a run, how it is started, and why it failed; ``verify`` goes from the user's words to a
  ``report``.
"""

"""Reinforcement learning: prompts, samples of the model, their rewards, and the loss that trains on them.

- ``samples``: the records of a prompt, a sample, a request to an engine and its answer;
- ``engine``, ``continuous``, ``vllm``: who generates; ``config.ENGINES`` is the table of engines;
- ``reward``: the user's functions, in processes of their own;
- ``policy_losses``, ``policy``: from rewards to the loss; ``policy_losses.LOSSES`` is the table of losses;
- ``sampler``: an engine and rewards, from prompts to rewarded samples;
- ``rollouts``: the loader of the trainer, which puts these together; ``run``: its parts from a configuration.
"""

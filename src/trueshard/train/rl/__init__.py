"""Reinforcement learning: prompts, samples of the model, their rewards, and the loss that trains on them.

- ``samples``: a sample, its name, and the random numbers that follow from the name;
- ``engine``, ``continuous``, ``vllm``: who generates; ``config.ENGINES`` has their table;
- ``reward``: the user's functions, in processes of their own;
- ``advantages``, ``policy``: from rewards to the loss; ``policy_losses.LOSSES`` is the table of losses;
- ``rollouts``: the loader of the trainer, which puts these together.
"""

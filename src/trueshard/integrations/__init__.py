"""TrueShard under other trainers: accelerate's ``Accelerator``, transformers' and TRL's ``Trainer``."""

"""TrueShard under other trainers: accelerate, transformers' and TRL's ``Trainer``, Lightning's, and ``Fabric``."""

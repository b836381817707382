"""Tests of transformers, Accelerate and Lightning, with DDP, their FSDP2 or TrueShard under them: ``make peers``.

- Tests run as they are, on two processes; a plugin of pytest changes what their trainer makes, no file of theirs.
- A test counts that passes on one process here. It passes on two if it passes on both of them.
"""

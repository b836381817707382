"""`trueshard.Trainer`, and the trainer behind `trueshard train` and `trueshard demo`.

`trainer` is the loop and needs nothing of the rest. Around it, from a configuration file to a run:

- `config`, `parse`: the TOML file and its overrides become checked, frozen settings;
- `run`: the processes, and the checks before they start; `run.session` is one rank's training;
- `models`, `data`, `losses`, `optimizer`, `rl`: its parts;
- `metrics`: what is measured, written and drawn.
"""

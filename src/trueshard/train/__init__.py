"""The trainer behind `trueshard train` and `trueshard demo`: a language model from a configuration file.

One small file a concept; the way of a run through them:

- `config`, `parse`: the TOML file and its overrides become checked, frozen settings;
- `preflight`: everything that can be wrong with them is found before a process starts;
- `launch`, `signals`: processes, ranks, and how a run is stopped;
- `text`, `tokens`, `order`: documents, packed tokens, and which of them make a batch;
- `model`, `optimizer`: what is trained, and by what;
- `loop`: the steps, which are `trueshard.shard()` and plain PyTorch;
- `checkpoints`, `metrics`, `progress`, `sample`, `report`: what a run leaves and shows.

Nothing here is imported by `import trueshard`.
"""

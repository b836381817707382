"""Configurations of other frameworks, as configurations of TrueShard.

- `frameworks/`: a table for each framework: what every key it knows becomes here, or why it has no equivalent. What a
  key means decides, not what it is called.
- `tables` reads them, `engine` applies their rules to the keys of a file, `converting` does the whole.
- `composer`, `huggingface`, `shared`, `torchtitan`: functions that rules name where data cannot say it.
"""

"""Configurations of other frameworks, as configurations of TrueShard.

- One table of rules for each framework (`accelerate`, `torchtitan`, `composer`, `huggingface`, `environment`), over one
  table of FSDP's own words (`fsdp`): every key they know becomes a key here, or is named as having no equivalent.
- The tables are data: conversion, report and the page for newcomers are made from the same rules.
- What a key means decides, not what it is called; where something differs, the rule says what, and so does the output.
"""

from trueshard.train.convert.converting import Converted, convert

__all__ = ["Converted", "convert"]

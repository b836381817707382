"""``make gpu``: what a machine with GPUs shows of TrueShard in its first hour, each step by itself.

- ``session``: one call's processes. Each has a time limit and is killed whole; page and figures are written after each.
- ``steps``: the table of steps, by worth: those that another step would be worthless without come first.
- ``measures`` and ``several``: the programs that a step runs on one device, and on several.
- ``page``: the page from the figures.

The driver itself imports nothing that must be installed: what is missing is a step that failed.
"""

"""Configurations of other frameworks, as configurations of TrueShard. What a key means decides, not its name."""

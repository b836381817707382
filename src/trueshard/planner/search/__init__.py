"""From many studies to one plan, with reasons."""

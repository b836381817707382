"""A study as text, as JSON, as a page; how two plans differ."""

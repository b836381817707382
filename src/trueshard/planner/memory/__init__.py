"""From a trace to live bytes, and to what the caching allocator makes of them."""

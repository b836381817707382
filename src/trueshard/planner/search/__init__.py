"""Choose one plan out of many studies, with reasons."""

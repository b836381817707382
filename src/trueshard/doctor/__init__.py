"""`trueshard doctor`: what is on this machine, and whether training works on it; findings as data."""

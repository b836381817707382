"""The contract, run on the user's own model, and any two runs; what is imported here needs no library but torch."""

from trueshard.verification.comparing import verify_runs as verify_runs
from trueshard.verification.recording import record as record

"""`trueshard.verify`: the contract on the user's own model, one process against many."""

"""Many requests at the same time: who takes part in a step, and what is run."""

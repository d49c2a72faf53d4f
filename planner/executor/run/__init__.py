"""Run micro-batches: the loop over a schedule's instructions, the module of a stage, and their helper modules."""

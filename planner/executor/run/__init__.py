"""Run micro-batches: the loop over a schedule, the module of a stage, and the modules that they use."""

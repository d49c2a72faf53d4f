"""What happens to a micro-batch: the loop over a schedule, the stage's module, and what they rest on."""

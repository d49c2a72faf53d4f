"""Models that the tests train, cut and measure: real ones, made small, and small ones with one trait each."""

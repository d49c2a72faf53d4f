"""Cost model: time and memory of a partition of the chain.

exact records   records of every tensor that a layer saves or passes on; without them, memory is an upper bound
component       kind of memory in a plan, such as parameters or transfers: one of `values.plan.ITEMS`
part            bytes of a stage that are allocated and freed together: one of `moments.PARTS`
level           highest memory while a layer or an action runs
held, kept      memory of a micro-batch between its forward and its backward; kept is that of the last one
in flight       from the start of a micro-batch's forward on a stage to the end of its backward there
U, `own_us`     time of a device between its last action and its next step: all-reduces and optimizer steps
"""

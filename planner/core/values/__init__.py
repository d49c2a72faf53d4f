"""What passes from part to part, frozen: profiles, plans, clusters, options, and what goes wrong with them."""
